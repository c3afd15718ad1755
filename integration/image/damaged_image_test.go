// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Whatever is wrong with an unpacked image, running it is refused with the name
// of the file, and nothing of the container is left running.
func TestDamageIsRefused(t *testing.T) {
	name := "example.com/damage:1"
	k := start(t, shared, harness.RunSpec{}, "pattern", "--bytes", "40M")
	k.Expect(t, "verify", "bad=0")
	dir, rw := dump(t, shared, k)
	k.MustRemove(t)
	layout, _ := layoutOf(t, shared, dir, rw, harness.WorkloadImage, name)
	importLayout(t, shared, layout, name)
	run := func() error {
		k, err := tryStart(t, harness.RunSpec{Image: name, Port: k.Port, Annotations: asked}, "pattern")
		if err == nil {
			k.MustRemove(t)
		}
		return err
	}
	if err := run(); err != nil {
		t.Fatal(err)
	}
	var meta, piece string
	for _, d := range checkpointDirs(t, shared) {
		entries, err := os.ReadDir(d)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.Name() == images.MetadataName {
				meta = filepath.Join(d, e.Name())
			}
			if images.IsAreaFile(e.Name()) {
				piece = filepath.Join(d, e.Name())
			}
		}
	}
	flip := func(path string, at int64) func(*testing.T) {
		return func(t *testing.T) {
			data := read(t, path)
			data[(at+int64(len(data)))%int64(len(data))] ^= 1
			write(t, path, data)
		}
	}
	inventory := filepath.Join(filepath.Dir(meta), "inventory.img")
	for _, c := range []struct {
		name   string
		path   string
		damage func(t *testing.T)
		says   string
	}{
		{"a digit of the metadata", meta, func(t *testing.T) {
			write(t, meta, bytes.Replace(read(t, meta), []byte(`"startNs": 0`), []byte(`"startNs": 1`), 1))
		}, images.MetadataName},
		{"the metadata's first byte", meta, flip(meta, 0), images.MetadataName},
		{"the metadata's last byte", meta, flip(meta, -1), images.MetadataName},
		{"the metadata cut", meta, func(t *testing.T) { truncate(t, meta, 100) }, images.MetadataName},
		{"the metadata gone", meta, func(t *testing.T) { gone(t, meta) }, images.MetadataName},
		{"the metadata a link", meta, func(t *testing.T) { link(t, meta) }, images.MetadataName},
		{"a newer schema", meta, func(t *testing.T) {
			write(t, meta, bytes.Replace(read(t, meta), []byte(`"schemaVersion": 2`), []byte(`"schemaVersion": 9`), 1))
		}, "unknown schema version 9"},
		{"a byte of GPU state", piece, flip(piece, 20<<20), filepath.Base(piece)[:len("gpu-1-0")]},
		{"the last byte of GPU state", piece, flip(piece, -1), filepath.Base(piece)[:len("gpu-1-0")]},
		{"GPU state cut", piece, func(t *testing.T) { truncate(t, piece, 4096*5+1) }, filepath.Base(piece)},
		{"GPU state cut at a page", piece, func(t *testing.T) { truncate(t, piece, 2<<20) }, filepath.Base(piece)[:len("gpu-1-0")]},
		{"GPU state gone", piece, func(t *testing.T) { gone(t, piece) }, filepath.Base(piece)[:len("gpu-1-0")]},
		{"GPU state a link", piece, func(t *testing.T) { link(t, piece) }, filepath.Base(piece)},
		{"CRIU's inventory gone", inventory, func(t *testing.T) { gone(t, inventory) }, "inventory.img"},
		{"CRIU's inventory cut", inventory, func(t *testing.T) { truncate(t, inventory, 9) }, "inventory.img"},
		{"CRIU's inventory a link", inventory, func(t *testing.T) { link(t, inventory) }, "inventory.img"},
	} {
		damaged := func(t *testing.T, says string) {
			data := read(t, c.path)
			t.Cleanup(func() { // as it was, whatever has become of it
				if err := os.Remove(c.path); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Error(err)
				}
				write(t, c.path, data)
			})
			c.damage(t)
			harness.Says(t, run(), says)
		}
		t.Run(c.name, func(t *testing.T) { damaged(t, filepath.Base(c.path)[:7]) })
		t.Run(c.name+", unsigned", func(t *testing.T) {
			shared.Configured(t, harness.AnyCheckpoint)
			damaged(t, c.says)
		})
	}
	if err := run(); err != nil {
		t.Errorf("mended: %v", err)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func truncate(t *testing.T, path string, size int64) {
	t.Helper()
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
}

func gone(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// link puts a symbolic link to a copy of the file in its place.
func link(t *testing.T, path string) {
	t.Helper()
	to := filepath.Join(t.TempDir(), "elsewhere")
	write(t, to, read(t, path))
	gone(t, path)
	if err := os.Symlink(to, path); err != nil {
		t.Fatal(err)
	}
}

// A disk that is full in the middle of a build: an error that says so, and
// neither an image nor a part of one.
func TestFullDisk(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "pattern", "--bytes", "100M")
	k.Expect(t, "verify", "bad=0")
	dir, rw := dump(t, shared, k)
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=70m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(small, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	l, err := layout.Open(filepath.Join(small, "layout"))
	if err != nil {
		t.Fatal(err)
	}
	before := files(t, small)
	checkpoint, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = oci.Build(t.Context(), l, oci.Options{
		Checkpoint: checkpoint, Base: target(t, shared, harness.WorkloadImage), Provider: shared.Client().ContentStore(),
		RW: &rw, Compression: oci.None, Discard: true,
	})
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("got %v", err)
	}
	for path := range files(t, small) {
		if _, ok := before[path]; !ok {
			t.Errorf("%s is left", path)
		}
	}
	if _, err := l.Get(""); err == nil {
		t.Error("there is an image")
	}
}
