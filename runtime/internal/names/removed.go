// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package names

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	remap "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const (
	remapImage = "remap-fpath.img"
	filesImage = "files.img"
)

// Removed has a dump, whose processes still stand still, open each file that was removed, and has
// another name, by that name. It refuses one whose other name is nowhere in the container. What is in a
// tmpfs of the container has been saved with CRIU's link, and needs no other name.
func Removed(ctx context.Context, dumped *image.Set, init int, pids func() ([]int, error)) error {
	links, err := linked(dumped)
	if err != nil || len(links) == 0 {
		return err
	}
	removed, mounts, err := removedFiles(dumped, links)
	if err != nil || len(removed) == 0 {
		return err
	}
	wanted := make(map[string]bool)
	for _, r := range removed {
		wanted[r.GetName()] = true
	}
	open, err := deleted(pids, wanted)
	if err != nil {
		return err
	}
	places := make(map[int32]map[inode]bool)
	for _, r := range removed {
		if at := open[r.GetName()]; len(at) == 1 { // of two files that had one name nobody knows which it is
			if places[r.GetMntId()] == nil {
				places[r.GetMntId()] = make(map[inode]bool)
			}
			places[r.GetMntId()][at[0]] = true
		}
	}
	found := make(map[inode]string)
	var failed error
	for id, wanted := range places {
		there, err := find(ctx, init, mounts[id], wanted, unix.PathMax)
		failed = errors.Join(failed, err)
		maps.Copy(found, there)
	}
	renamed := make(map[uint32]string)
	for _, r := range removed {
		if at := open[r.GetName()]; len(at) == 1 && found[at[0]] != "" {
			renamed[r.GetId()] = found[at[0]]
			continue
		}
		err := fmt.Errorf("%s was removed while it is open, and its other name is not in the container: close the file, or keep it in /dev/shm", r.GetName())
		return fmt.Errorf("%w: %w", errors.Join(err, failed), errdefs.ErrFailedPrecondition)
	}
	return rename(dumped, links, renamed)
}

// linked returns the files that CRIU has made a link to, with the link, both by their numbers.
func linked(dumped *image.Set) (map[uint32]uint32, error) {
	links := make(map[uint32]uint32)
	if !dumped.Has(remapImage) {
		return nil, nil
	}
	err := image.EachOf(dumped, remapImage, func(r *remap.RemapFilePathEntry) error {
		if r.GetRemapType() == remap.RemapType_LINKED {
			links[r.GetOrigId()] = r.GetRemapId()
		}
		return nil
	})
	return links, err
}

// removedFiles returns the files with a link whose content is not in the dump, and where mounts are.
func removedFiles(dumped *image.Set, links map[uint32]uint32) (removed []*regfile.RegFileEntry, mounts map[int32]string, err error) {
	mounts, saved, kept := make(map[int32]string), make(map[int32]bool), proc.Bound(0)
	err = image.EachOf(dumped, "mountpoints-*.img", func(m *mnt.MntEntry) error {
		outside := m.GetExtMount() || m.GetExtKey() != ""
		mounts[int32(m.GetMntId())] = path.Clean("/" + m.GetMountpoint())
		saved[int32(m.GetMntId())] = !outside && m.GetFstype() == uint32(mnt.Fstype_TMPFS) ||
			m.GetExtKey() == "/dev/shm" && dumped.Has(tmpfs.ShmImage)
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	err = image.EachOf(dumped, filesImage, func(m *fdinfo.FileEntry) error {
		if r := m.GetReg(); r != nil && links[r.GetId()] != 0 {
			removed = append(removed, r)
			return kept.Take(r.GetName())
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	return slices.DeleteFunc(removed, func(r *regfile.RegFileEntry) bool { return saved[r.GetMntId()] }), mounts, nil
}

// deleted returns the files that processes have open, mapped or execute, by the names that they had, of
// those that are wanted. Of more than one file of a name it returns two.
func deleted(list func() ([]int, error), wanted map[string]bool) (map[string][]inode, error) {
	pids, err := list()
	if err != nil {
		return nil, err
	}
	files := make(map[string][]inode)
	for _, pid := range pids {
		links := []string{"exe"}
		for _, kind := range []string{"fd", "map_files"} {
			all, err := proc.Names(fmt.Sprintf("/proc/%d/%s", pid, kind))
			if err != nil && !proc.Ended(err) {
				return nil, err
			}
			for _, name := range all {
				links = append(links, kind+"/"+name)
			}
		}
		for _, link := range links {
			var st unix.Stat_t
			at := fmt.Sprintf("/proc/%d/%s", pid, link)
			to, _ := os.Readlink(at) // what has gone meanwhile is not found
			name, is := strings.CutSuffix(to, " (deleted)")
			if is && wanted[name] && len(files[name]) < 2 && unix.Stat(at, &st) == nil && !slices.Contains(files[name], inodeOf(&st)) {
				files[strings.Clone(name)] = append(files[name], inodeOf(&st))
			}
		}
	}
	return files, nil
}

// rename has files of a dump opened by other names, and takes out CRIU's links to them.
func rename(dumped *image.Set, links map[uint32]uint32, renamed map[uint32]string) error {
	gone := make(map[uint32]bool)
	for id := range renamed {
		gone[links[id]] = true
	}
	err := image.EditOf(dumped, remapImage, func(r *remap.RemapFilePathEntry) error {
		if renamed[r.GetOrigId()] != "" {
			return image.ErrOmit
		}
		return nil
	})
	if err != nil {
		return err
	}
	return image.EditOf(dumped, filesImage, func(f *fdinfo.FileEntry) error {
		r := f.GetReg()
		switch {
		case r == nil:
		case gone[r.GetId()]:
			return image.ErrOmit
		case renamed[r.GetId()] != "":
			r.Name = new(renamed[r.GetId()])
		}
		return nil
	})
}
