// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
)

// The dump of a command that was killed is removed by the next one, that of one
// that lives is not.
func TestMakeDumpDir(t *testing.T) {
	in := t.TempDir()
	left, other := filepath.Join(in, dumpPrefix+"killed"), filepath.Join(in, "mine")
	for _, dir := range []string{left, other} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "gpu-1-0"), []byte("state"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	var dirs []string
	var releases []func() error
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			dir, release, err := makeDumpDir(in)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			dirs, releases = append(dirs, dir), append(releases, release)
		})
	}
	all.Wait()
	want := append(slices.Clone(dirs), other)
	slices.Sort(want)
	if got := list(t, in); !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
	for _, release := range releases {
		if err := release(); err != nil {
			t.Error(err)
		}
	}
	if got := list(t, in); !slices.Equal(got, []string{other}) {
		t.Errorf("left: %q", got)
	}
}

func list(t *testing.T, in string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(in, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}
