// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
)

// What was removed gets a name in which nothing is in its way, and no link leads out of the container.
func TestFree(t *testing.T) {
	rootfs, volume, outside := t.TempDir(), t.TempDir(), t.TempDir()
	for _, dir := range []string{filepath.Join(rootfs, "dir/dir"), filepath.Join(rootfs, "dir/dir.removed"), filepath.Join(rootfs, "file.removed/dir"), filepath.Join(outside, "dir")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.WriteFile(filepath.Join(rootfs, "file"), nil, 0o600), os.WriteFile(filepath.Join(volume, "file"), nil, 0o600),
		os.WriteFile(filepath.Join(rootfs, "ghost.cr.1f.ghost"), nil, 0o600), os.Symlink(outside, filepath.Join(rootfs, "link"))); err != nil {
		t.Fatal(err)
	}
	p := newPaths(&specs.Spec{Mounts: []specs.Mount{
		{Destination: "/dir/volume", Type: "bind", Source: volume}, {Destination: "/bound", Type: "bind", Source: filepath.Join(volume, "file")},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm"}, {Destination: "/new/volume", Type: "bind", Source: volume},
	}}, rootfs)
	for name, want := range map[string]string{ // of a directory
		"/new": "/new", "/new/dir": "/dir.7.removed", "/new/dir/dir": "/dir.7.removed", "/new/" + strings.Repeat("x", 255): "/" + strings.Repeat("x", 118) + ".7.removed", "/dir/dir": "/dir/dir.removed.removed", "/dir/new": "/dir/new",
		"/file": "/file.removed.removed", "/file/dir": "/file.removed/dir.removed", "/file/new/dir": "/file.removed/dir.7.removed",
		"/link/dir": "/dir.7.removed", "/dir/volume/file": "/dir/volume/file.removed", "/dir/volume/file/dir": "/dir/volume/dir.7.removed",
		"/bound/dir": "/bound/dir", "/dev/shm/dir": "/dev/shm/dir.removed", "/dev/shm/file/dir": "/dev/shm/dir.7.removed", "/new/volume/dir": "/new/volume/dir",
		"/dir/../dir/dir": "/dir/../dir/dir", "dir": "dir", "/..": "/..",
	} {
		if got, err := p.free(name, "", 7); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", name, got, err, want)
		}
	}
	for name, want := range map[string]string{"/dir/dir": "/dir/dir", "/file/x": "/file.removed/x", "/link/x": "/link.removed/x", "/ghost": "/ghost.removed"} { // of a file
		if got, err := p.free(name, ".cr.1f.ghost", 7); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", name, got, err, want)
		}
	}
	if _, err := p.free("/"+strings.Repeat("x", 256), "", 7); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Errorf("a long name: %v", err)
	}
}

// Where a file of a tmpfs has the name of a directory in which a file was, the removed file gets a directory of another
// name. The dump says what is in the tmpfs.
func TestBesideFiles(t *testing.T) {
	dump, _ := zoo(t)
	shm := t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(shm, "dir"), 0o700), os.WriteFile(filepath.Join(shm, "dir/file"), nil, 0o600), os.WriteFile(filepath.Join(shm, "file"), nil, 0o600),
		os.WriteFile(filepath.Join(shm, "file.removed"), nil, 0o600), os.Link(filepath.Join(shm, "file"), filepath.Join(shm, "same")), os.Symlink("dir", filepath.Join(shm, "link")),
		os.WriteFile(filepath.Join(shm, "gone.removed"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	dumped := criu.Open(dump)
	d, err := dumped.Dump()
	if err != nil {
		t.Fatal(err)
	}
	image := tmpfs.ShmImage // as in a pod
	for _, m := range d.Mounts {
		if m.GetMountpoint() == tmpfs.ShmPath {
			image = fmt.Sprintf("tmpfs-dev-%d.tar.gz.img", m.GetRootDev())
		}
	}
	if image == tmpfs.ShmImage {
		t.Fatal("the dump has no tmpfs")
	}
	names := map[string]string{
		"file/x": "file.removed.removed/x", "dir/file/x/y": "dir/file.removed/x/y", "same/x": "same.removed/x", "link/x": "link.removed/x",
		"gone.removed/x": "gone.removed.removed/x", "dir/x": "", "dir": "", "file": "", "new/x": "", "files/x": "", "fil/x": "",
	}
	for _, of := range []string{image, tmpfs.ShmImage} {
		if err := os.RemoveAll(filepath.Join(dump, image)); err != nil {
			t.Fatal(err)
		}
		from, err := os.Open(shm)
		if err != nil {
			t.Fatal(err)
		}
		to, err := os.Create(filepath.Join(dump, of))
		if err == nil {
			err = errors.Join(tmpfs.Save(from, to), to.Close(), from.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for name := range names {
			all = append(all, "/dev/shm/"+name, "/elsewhere/"+name)
		}
		got, err := besideFiles(dumped, all, of == tmpfs.ShmImage)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range names {
			if want != "" {
				want = "/dev/shm/" + want
			}
			if got["/dev/shm/"+name] != want || got["/elsewhere/"+name] != "" {
				t.Errorf("%s: %s becomes %q, want %q", of, name, got["/dev/shm/"+name], want)
			}
		}
	}
}

// A path is as long as a program likes, and costs what its length is, not its square.
func TestLongPaths(t *testing.T) {
	const depth = 1000
	rootfs := t.TempDir()
	at, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range depth {
		if err := unix.Mkdirat(at, "d", 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(at, "d", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		unix.Close(at)
		if err != nil {
			t.Fatal(err)
		}
		at = next
	}
	unix.Close(at)
	p, there := newPaths(&specs.Spec{}, rootfs), strings.Repeat("/d", depth)
	for name, do := range map[string]func() error{
		"a removed directory": func() error {
			got, err := p.free(there, "", 7)
			if err == nil && got != there+removedSuffix {
				err = errors.New(got)
			}
			return err
		},
		"a log that is there": func() error {
			made, err := p.makeLog(there, 0o600, 0, 0)
			if made != nil {
				err = errors.New("it was made")
			}
			return err
		},
		"a log whose directories are gone": func() error {
			if made, err := p.makeLog(there+strings.Repeat("/e", depth/2), 0o600, 0, 0); made != nil || err == nil {
				return errors.New("it was made")
			}
			return nil
		},
	} {
		// A part that is looked at takes some memory, of which nothing frees.
		if n := testing.AllocsPerRun(1, func() {
			if err := do(); err != nil {
				t.Errorf("%s: %.200s", name, err)
			}
		}); n > 10*depth {
			t.Errorf("%s: %d parts are looked at some %.0f times", name, depth, n)
		}
	}
}
