// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestBins(t *testing.T) {
	dir := t.TempDir()
	for _, file := range []string{"a/ctr", "b/ctr", "b/criu/criu", "b/softcuda/libcuda.so.1"} {
		path := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv(EnvBin, filepath.Join(dir, "a")+":"+filepath.Join(dir, "b"))
	bins, err := FindBins()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"ctr":                   "a/ctr", // the first directory wins
		"criu":                  "b/criu/criu",
		"softcuda/libcuda.so.1": "b/softcuda/libcuda.so.1",
	} {
		if got, err := bins.Path(name); got != filepath.Join(dir, want) || err != nil {
			t.Errorf("Path(%q) is %q, error %v, want %q", name, got, err, want)
		}
	}
	if _, err := bins.Path("runc"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), dir) {
		t.Errorf("Path(runc): error %v is not fs.ErrNotExist, or names no directory", err)
	}
	want := strings.Join([]string{filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "b/criu"), os.Getenv("PATH")}, ":")
	if got := bins.SearchPath(); got != want {
		t.Errorf("SearchPath is %q, want %q", got, want)
	}
}

func TestBinsRefused(t *testing.T) {
	t.Setenv(EnvBin, "")
	if _, err := FindBins(); !errors.Is(err, ErrNoBins) {
		t.Errorf("without %s: error %v, want ErrNoBins", EnvBin, err)
	}
	t.Setenv(EnvBin, "/no/such/directory")
	if _, err := FindBins(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("with a missing directory: error %v, want fs.ErrNotExist", err)
	}
	t.Setenv(EnvBin, "/proc/self/exe")
	if _, err := FindBins(); err == nil {
		t.Error("a file was taken for a directory")
	}
}
