// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// DiskDir is T.TempDir on a disk: a machine's directory for temporary files may be
// memory, and the tests may have been given one that is (GPUCKPT_TEST_DIR).
func DiskDir(t T) string {
	t.Helper()
	for _, parent := range []string{os.TempDir(), "/var/tmp"} {
		var st unix.Statfs_t
		if err := unix.Statfs(parent, &st); err != nil || st.Type == unix.TMPFS_MAGIC {
			continue
		}
		dir, err := os.MkdirTemp(parent, "gpuckpt-disk-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	t.Fatal("neither the directory for temporary files nor /var/tmp is on a disk")
	return ""
}

// SmallDisk is a directory with room for so many bytes ("8m", as a tmpfs is asked for them) that is no
// tmpfs to those who look: an overlay over one.
func SmallDisk(t T, size string) string {
	t.Helper()
	base, err := os.MkdirTemp("", "gpuckpt-small-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
	})
	mount := func(source, target, kind, data string) {
		if err := unix.Mount(source, target, kind, 0, data); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	}
	mount("tmpfs", base, "tmpfs", "size="+size)
	var dirs []string
	for _, name := range []string{"lower", "upper", "work", "disk"} {
		dir := filepath.Join(base, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, dir)
	}
	mount("overlay", dirs[3], "overlay", "lowerdir="+dirs[0]+",upperdir="+dirs[1]+",workdir="+dirs[2])
	return dirs[3]
}

// ForgetCache has the kernel drop what it keeps in memory of a directory's files on a disk, but what is
// mapped or in use: the next read of them is one of the disk.
func ForgetCache(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := f.Sync(); err != nil {
			return err
		}
		return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	})
}
