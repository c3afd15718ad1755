// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driverroot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// library puts a libcuda.so.1 into a directory below a root: one that is an ELF file of 64 bits.
func library(t *testing.T, elem ...string) string {
	t.Helper()
	dir := filepath.Join(elem...)
	self, err := os.Executable()
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err == nil {
		err = os.Symlink(self, filepath.Join(dir, Library))
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestFind(t *testing.T) {
	none := t.TempDir()
	was, wereDirs, cached := usual, loaderDirs, loaderCache
	t.Cleanup(func() { usual, loaderDirs, loaderCache = was, wereDirs, cached })
	loaderDirs, loaderCache = nil, filepath.Join(none, "ld.so.cache")

	operator, cos, host := t.TempDir(), t.TempDir(), t.TempDir()
	inOperator := library(t, operator, "usr/lib/x86_64-linux-gnu")
	inCOS, onHost := library(t, cos, "lib64"), library(t, host, "usr/lib64")
	specs := t.TempDir()
	spec := fmt.Sprintf(`{"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {"env": ["A=b"]}}],
"containerEdits": {"mounts": [{"hostPath": %q, "containerPath": "/usr/lib64/libcuda.so.580.95.05"}]}}`, filepath.Join(inCOS, "libcuda.so.580.95.05"))
	if err := os.WriteFile(filepath.Join(specs, "nvidia.json"), []byte(spec), 0o600); err != nil {
		t.Fatal(err)
	}
	usual = []string{filepath.Join(none, "missing"), operator}
	for name, c := range map[string]struct {
		root, path string
		specs      []string
		cache      string
		want       Place
	}{
		"configured":             {root: cos, path: onHost, want: Place{inCOS, cos, "driver_root"}},
		"configured to the leaf": {root: inCOS, want: Place{inCOS, inCOS, "driver_root"}},
		"LD_LIBRARY_PATH":        {path: "/nowhere:" + onHost, specs: []string{specs}, want: Place{From: "loader"}},
		"the loader's cache":     {cache: "x\x00libc.so.6\x00" + onHost + "/libcuda.so.1\x00", specs: []string{specs}, want: Place{From: "loader"}},
		"a cache that is stale":  {cache: "x\x00" + none + "/libcuda.so.1\x00", specs: []string{specs}, want: Place{Dir: inCOS, From: "CDI specification"}},
		"a specification":        {specs: []string{specs}, want: Place{Dir: inCOS, From: "CDI specification"}},
		"a usual place":          {specs: []string{none}, want: Place{inOperator, operator, "usual place"}},
	} {
		if err := os.WriteFile(loaderCache, []byte(c.cache), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := Find(c.root, c.path, c.specs); got != c.want || err != nil {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, c.want)
		}
	}
	if _, err := Find(none, onHost, nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("a driver_root without a driver: %v", err)
	}
	usual, loaderCache = nil, filepath.Join(none, "no cache")
	if got, err := Find("", "", []string{none}); got != (Place{}) || err != nil {
		t.Errorf("no driver: %+v, %v", got, err)
	}
}
