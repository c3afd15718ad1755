// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package imagedir

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
)

func TestIsTemporary(t *testing.T) {
	for dir, want := range map[string]bool{
		"/run/user/0/ctrd-checkpoint123": true,
		"/tmp/ctrd-checkpoint4/":         true,
		"/tmp/ctrd-checkpoint":           true,
		"/tmp/ctrd-checkpoint1/sub":      false,
		"/data/my-checkpoint":            false,
		"/data/ctrd-check":               false,
		"/":                              false,
		"":                               false,
	} {
		if got := IsTemporary(dir); got != want {
			t.Errorf("IsTemporary(%q) is %v", dir, got)
		}
	}
}

// A directory of containerd's own that is gone means that nobody waits; one of
// the user's need not be there yet.
func TestClientWaits(t *testing.T) {
	dir := t.TempDir()
	for path, gone := range map[string]bool{
		dir:                                      false,
		filepath.Join(dir, "not-made-yet"):       false,
		filepath.Join(dir, "ctrd-checkpoint123"): true,
	} {
		if err := ClientWaits(path); (err != nil) != gone {
			t.Errorf("%s: error %v", path, err)
		}
	}
}

func TestSize(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "a"), "12345")
	writeFile(t, filepath.Join(dir, "b"), "678")
	if err := os.Symlink("a", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if got, err := Size(dir); err != nil || got != 8 {
		t.Errorf("got %d, error %v; want 8", got, err)
	}
	if _, err := Size(filepath.Join(dir, "none")); err == nil {
		t.Error("no error for a directory that is not there")
	}
}

func writeFile(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// writeFileIn writes a file into a directory that need not be there.
func writeFileIn(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, name), "")
}

// A failed checkpoint leaves the directory for the images as it was found.
func TestDir(t *testing.T) {
	list := func(dir string) (names []string) {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	for _, test := range []struct {
		name string
		had  []string // nil: there is no directory
		left []string
	}{
		{"none", nil, nil},
		{"empty", []string{}, nil},
		{"with something", []string{"notes.txt"}, []string{"inventory.img", "notes.txt"}},
	} {
		d := &Dir{Path: filepath.Join(t.TempDir(), "images")}
		if test.had != nil {
			if err := os.Mkdir(d.Path, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range test.had {
			writeFile(t, filepath.Join(d.Path, name), "")
		}
		if err := d.Prepare(); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"gpu-1-0", "inventory.img"} {
			writeFile(t, filepath.Join(d.Path, name), "")
		}
		if err := d.Leave(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(d.Path); os.IsNotExist(err) != (test.had == nil) {
			t.Errorf("%s: the directory: %v", test.name, err)
		}
		if got := list(d.Path); !slices.Equal(got, test.left) {
			t.Errorf("%s: left %q, want %q", test.name, got, test.left)
		}
		writeFileIn(t, d.Path, "gpu-7-0")
		d = &Dir{Path: d.Path}
		if err := d.Prepare(); err == nil {
			t.Errorf("%s: a directory with GPU state: no error", test.name)
		}
		if err := os.Remove(filepath.Join(d.Path, "gpu-7-0")); err != nil {
			t.Errorf("%s: GPU state of another checkpoint: %v", test.name, err)
		}
	}
}

// A checkpoint without GPU state may be overwritten, and is incomplete from the dump on, not before;
// one with GPU state may not.
func TestRequireEmpty(t *testing.T) {
	m := &images.Metadata{SchemaVersion: images.SchemaVersion, Created: time.Now().UTC()}
	dir := t.TempDir()
	if err := images.WriteMetadata(dir, m); err != nil {
		t.Fatal(err)
	}
	if err := RequireEmpty(dir); err != nil {
		t.Error(err)
	}
	if _, err := images.ReadMetadata(dir); err != nil {
		t.Errorf("it was changed before the dump: %v", err)
	}
	for range 2 { // the second time there is none
		if err := BeginDump(dir); err != nil {
			t.Error(err)
		}
	}
	if _, err := images.ReadMetadata(dir); !errors.Is(err, images.ErrNoMetadata) {
		t.Errorf("it is still complete: %v", err)
	}
	m.DriverVersion, m.Processes = "580.1", []images.Process{{PID: 1, State: "running", GPUs: []string{}}}
	if err := images.WriteMetadata(dir, m); err != nil {
		t.Fatal(err)
	}
	if err := RequireEmpty(dir); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a GPU checkpoint: %v", err)
	}
	writeFile(t, filepath.Join(dir, images.MetadataName), "{")
	if err := RequireEmpty(dir); !errdefs.IsAlreadyExists(err) {
		t.Errorf("something that is no checkpoint: %v", err)
	}
}

// TestRemoveUnpacked sees that the names go at once, and that nobody waits for the room of what is large.
func TestRemoveUnpacked(t *testing.T) {
	bundle, dir := t.TempDir(), filepath.Join(t.TempDir(), "ctrd-checkpoint1")
	for _, name := range []string{"small", "large"} {
		writeFileIn(t, dir, name)
	}
	if err := os.Truncate(filepath.Join(dir, "large"), large); err != nil {
		t.Fatal(err)
	}
	if err := NoteUnpacked(bundle, dir); err != nil {
		t.Fatal(err)
	}
	removed, err := RemoveUnpacked(bundle)
	if err != nil || len(removed) != 1 {
		t.Fatalf("%d files are kept open, want 1; error %v", len(removed), err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory: %v", err)
	}
	if info, err := removed[0].Stat(); err != nil || info.Size() != large {
		t.Errorf("the large file's room: %v, error %v", info, err)
	}
	freed := make(chan struct{})
	removed.Free(func() { freed <- struct{}{} }) // which would never return if it waited
	<-freed
	if _, err := removed[0].Stat(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the large file is still open: %v", err)
	}
	if again, err := RemoveUnpacked(bundle); err != nil || again != nil {
		t.Errorf("again: %v, error %v", again, err)
	}
}
