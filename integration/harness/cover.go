// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Covered is a directory of the machine below an overlay (Cover).
type Covered struct{ below, written *os.File }

// Cover mounts an overlay on a directory. What this program, and what it starts, write there from now
// on is in memory and never reaches the machine; what others write there is not in Written. What is
// mounted below the directory stays in its place. The program must be in a mount namespace of its own
// (InOwnNetwork), whose end is the end of the overlay. After an error the program is to end.
func Cover(dir string) (*Covered, error) {
	c, err := cover(dir)
	if err != nil {
		return nil, fmt.Errorf("cover %s: %w", dir, err)
	}
	return c, nil
}

func cover(dir string) (*Covered, error) {
	points, err := MountsUnder(dir)
	if err != nil {
		return nil, err
	}
	below, err := openPath(dir)
	if err != nil {
		return nil, err
	}
	kept := make(map[string]*os.File) // each with what is mounted below it
	slices.Sort(points)
	for _, point := range points {
		in := func(dir string) bool { return strings.HasPrefix(point, dir+"/") }
		if !in(dir) || slices.ContainsFunc(slices.Collect(maps.Keys(kept)), in) || kept[point] != nil {
			continue
		}
		if kept[point], err = openPath(point); err != nil {
			return nil, err
		}
		defer kept[point].Close()
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return nil, err
	}
	// The memory is below the overlay, where no path leads to it.
	if err := unix.Mount("gpuckpt-test", dir, "tmpfs", 0, "mode=755"); err != nil {
		return nil, err
	}
	upper, work := filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	for _, path := range []string{upper, work} {
		if err := os.Mkdir(path, 0o755); err != nil {
			return nil, err
		}
	}
	if err := unix.Chown(upper, int(st.Uid), int(st.Gid)); err != nil {
		return nil, err
	}
	if err := unix.Chmod(upper, st.Mode&0o7777); err != nil {
		return nil, err
	}
	written, err := openPath(upper)
	if err != nil {
		return nil, err
	}
	c := &Covered{below, written}
	if err := unix.Mount("gpuckpt-test", dir, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", by(below), upper, work)); err != nil {
		return nil, err
	}
	for point, f := range kept {
		if err := unix.Mount(by(f), point, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return nil, fmt.Errorf("keep %s: %w", point, err)
		}
	}
	return c, nil
}

func openPath(path string) (*os.File, error) { return os.OpenFile(path, unix.O_PATH, 0) }

// by is a path that leads to an open file, also where another one is mounted over it.
func by(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// Written returns what was written since: the names below the directory, each with the path of the
// file as it is now. That of a file that was removed leads to a character device 0, 0. A directory
// in which something was written is among them.
func (c *Covered) Written() (map[string]string, error) {
	paths := make(map[string]string)
	root := by(c.written)
	err := filepath.WalkDir(root+"/.", func(path string, _ fs.DirEntry, err error) error {
		if name := strings.TrimPrefix(path, root+"/"); name != "." {
			paths[name] = path
		}
		return err
	})
	return paths, err
}

// New returns the names of Written that the machine does not have.
func (c *Covered) New() (map[string]bool, error) {
	written, err := c.Written()
	names := make(map[string]bool)
	for name := range written {
		if _, err := os.Lstat(filepath.Join(by(c.below), name)); err != nil {
			names[name] = true
		}
	}
	return names, err
}
