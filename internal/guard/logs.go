// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	goruntime "runtime"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	remap "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// makeLogs makes the files that a dump has open for appending alone and that are not there any more, as
// after a log is rotated or its volume is new: a program that appends reads nothing of what is gone. They
// are made with the rights of the container's first process. It returns their paths in the container. A
// file that cannot be made is left to CRIU, which names it.
func makeLogs(spec *specs.Spec, images *criu.Images, d *criu.Dump, rootfs string) (made []string, err error) {
	unnamed := make(map[uint32]bool)
	var logs []*fdinfo.FileEntry
	for _, name := range []string{"remap-fpath.img", "files.img"} {
		if !images.Has(name) {
			continue
		}
		err := images.Each(name, func(e *image.Entry) error {
			switch m := e.Message.(type) {
			case *remap.RemapFilePathEntry:
				unnamed[m.GetOrigId()] = true // it had no name when it was dumped
			case *fdinfo.FileEntry:
				if r := m.GetReg(); r.GetFlags()&(unix.O_ACCMODE|unix.O_APPEND) == unix.O_WRONLY|unix.O_APPEND {
					logs = append(logs, m)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if len(logs) == 0 || len(d.Tasks) == 0 || len(d.Tasks[0].Threads) == 0 {
		return nil, nil
	}
	spec, _ = bundle.AtPlaces(spec, rootfs)
	places, creds := newPaths(spec, rootfs), d.Tasks[0].Threads[0].GetCreds()
	uid := bundle.HostID(creds.GetFsuid(), spec.Linux.UIDMappings)
	gid := bundle.HostID(creds.GetFsgid(), spec.Linux.GIDMappings)
	for _, f := range logs {
		r := f.GetReg()
		if unnamed[r.GetId()] {
			continue
		}
		is := false
		if is, err = places.makeLog(r.GetName(), r.GetMode(), uid, gid); err != nil {
			return made, fmt.Errorf("make the log %s anew: %w", r.GetName(), err)
		}
		if is {
			made = append(made, r.GetName())
		}
	}
	return made, nil
}

// makeLog makes one file and the directories that it lies in, by the rights of a user, and reports
// whether it did.
func (p *paths) makeLog(name string, mode, uid, gid uint32) (bool, error) {
	root, rest := p.within(name)
	if st, err := os.Stat(root); err != nil || !st.IsDir() {
		return false, nil // a file that is mounted by itself, or a file system that is not there yet
	}
	within, err := os.OpenRoot(root)
	if err != nil {
		return false, err
	}
	defer within.Close()
	rest = path.Join(".", rest)
	if _, err := within.Lstat(rest); !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	defer func() {
		_, _ = unix.SetfsuidRetUid(0)
		_, _ = unix.SetfsgidRetGid(0)
	}()
	if _, err := unix.SetfsgidRetGid(int(gid)); err != nil {
		return false, err
	}
	if _, err := unix.SetfsuidRetUid(int(uid)); err != nil {
		return false, err
	}
	if err := within.MkdirAll(path.Dir(rest), 0o755); err != nil {
		return false, err
	}
	f, err := within.OpenFile(rest, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return false, err
	}
	// CRIU compares the mode.
	return true, errors.Join(f.Chmod(os.FileMode(mode)&os.ModePerm), f.Close())
}
