// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package install tests "gpuckpt install" and "gpuckpt uninstall" with real containerds: those of
// all supported versions in roots of their own, and one that runs containers.
package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/cli/installcmd/install"
)

var (
	session *harness.Session
	bins    harness.Bins
	gpu     harness.GPU
	results *harness.Results
)

func TestMain(m *testing.M) {
	harness.Main(m.Run, func(s *harness.Session) error {
		session, bins, gpu, results = s, s.Bins, s.GPU, s.Results
		return nil
	})
}

// release makes a directory like that of a release. end is put behind each program, which makes it
// another version's to all but the kernel.
func release(t *testing.T, end string) string {
	t.Helper()
	dir := t.TempDir()
	programs, err := bins.Release()
	if err != nil {
		t.Fatal(err)
	}
	for place, from := range programs {
		if strings.Contains(place, "/criu/lib/") { // the loader reads all of these
			copyFile(t, from, filepath.Join(dir, place), "")
			continue
		}
		copyFile(t, from, filepath.Join(dir, place), end)
	}
	return dir
}

func copyFile(t *testing.T, from, to, end string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(to), 0o755)
	}
	if err == nil {
		err = os.WriteFile(to, append(data, end...), 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// gpuckpt runs the gpuckpt of a release.
func gpuckpt(t *testing.T, release string, env []string, args ...string) (install.Result, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(release, "bin/gpuckpt"), append(args, "--json")...)
	cmd.Env = append(os.Environ(), env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return install.Result{}, fmt.Errorf("%w: %s", err, stderr.String())
	}
	var r install.Result
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return r, nil
}

// files are the regular files below a directory, with their content.
func files(t *testing.T, root string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		found[strings.TrimPrefix(path, root)] = string(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func same(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	for path, text := range want {
		if got[path] != text {
			t.Errorf("%s: %s has changed", what, path)
		}
	}
	for path := range got {
		if _, ok := want[path]; !ok {
			t.Errorf("%s: %s is left", what, path)
		}
	}
}
