// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	goruntime "runtime"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	remap "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	"github.com/containerd/log"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// mostLogs bounds the logs that are made anew, and mostDirs the directories for each.
const mostLogs, mostDirs = 1024, 32

// madeLog is a log that was made anew.
type madeLog struct {
	root, name string      // a directory of this machine, and the file below it
	is         fs.FileInfo // of the file
	dirs       []string    // those that were made for it, the deepest first
}

// makeLogs makes the files that a dump has open for appending alone and that are not there any more, as
// after a log is rotated or its volume is new: a program that appends reads nothing of what is gone. They
// are made with the rights of the container's first process, and the modes that the files had, by their
// numbers. A file that cannot be made is left to CRIU, which names it.
func makeLogs(ctx context.Context, spec *specs.Spec, images *criu.Images, d *criu.Dump, rootfs string, modes map[uint32]uint32) (made []madeLog) {
	failed := func(err error) { // CRIU says that the file is not there
		log.G(ctx).WithError(err).Warn("a log that is not here was not made anew")
	}
	logs, err := logsOf(images)
	if err != nil {
		failed(err)
	}
	if len(logs) == 0 || len(d.Tasks) == 0 || len(d.Tasks[0].Threads) == 0 {
		return nil
	}
	spec, _ = bundle.AtPlaces(spec, rootfs)
	places, creds := newPaths(spec, rootfs), d.Tasks[0].Threads[0].GetCreds()
	uid := bundle.HostID(creds.GetFsuid(), spec.Linux.UIDMappings)
	gid := bundle.HostID(creds.GetFsgid(), spec.Linux.GIDMappings)
	for _, r := range logs {
		is, err := places.makeLog(r.GetName(), modes[r.GetId()], uid, gid)
		if err == nil && is != nil && len(made) == mostLogs {
			made, err = append(made, *is), fmt.Errorf("more than %d logs are missing", mostLogs)
		}
		if err != nil {
			failed(fmt.Errorf("make the log %s anew: %w", r.GetName(), err))
			break
		}
		if is != nil {
			made = append(made, *is)
			log.G(ctx).Warnf("%s is not here: the program appends to a new one", r.GetName())
		}
	}
	return made
}

func isLog(r *regfile.RegFileEntry) bool {
	return r.GetFlags()&(unix.O_ACCMODE|unix.O_APPEND) == unix.O_WRONLY|unix.O_APPEND
}

// logsOf returns the files that a dump has open for appending alone, and that had a name.
func logsOf(images *criu.Images) (logs []*regfile.RegFileEntry, err error) {
	unnamed := make(map[uint32]bool)
	for _, name := range []string{"remap-fpath.img", "files.img"} {
		if !images.Has(name) {
			continue
		}
		err := images.Each(name, func(e *image.Entry) error {
			switch m := e.Message.(type) {
			case *remap.RemapFilePathEntry:
				unnamed[m.GetOrigId()] = true
			case *fdinfo.FileEntry:
				if r := m.GetReg(); isLog(r) {
					logs = append(logs, r)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return slices.DeleteFunc(logs, func(r *regfile.RegFileEntry) bool { return unnamed[r.GetId()] }), nil
}

// makeLog makes one file and the directories that it lies in, by the rights of a user; nil if there is
// nothing to make, or no place for it: nothing is written by the host's way to what is mounted read-only.
func (p *paths) makeLog(name string, mode, uid, gid uint32) (_ *madeLog, err error) {
	if p.ro[p.mountOf(name)] {
		return nil, nil
	}
	root, rest := p.within(name)
	if st, err := os.Stat(root); err != nil || !st.IsDir() {
		return nil, nil // a file that is mounted by itself, or a file system that is not there yet
	}
	within, err := os.OpenRoot(root)
	if err != nil {
		return nil, err
	}
	defer within.Close()
	made := &madeLog{root: root, name: path.Join(".", rest)}
	top, err := within.Open(".")
	if err != nil {
		return nil, err
	}
	defer top.Close()
	missing := func(name string) bool { // in one step: a tenant's path has up to two thousand parts
		var fd int
		fd, err = proc.Openat2(int(top.Fd()), name, &unix.OpenHow{
			Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err == nil {
			unix.Close(fd)
		}
		return errors.Is(err, unix.ENOENT)
	}
	if !missing(made.name) {
		return nil, err
	}
	for dir := path.Dir(made.name); missing(dir); dir = path.Dir(dir) {
		if made.dirs = append(made.dirs, dir); len(made.dirs) > mostDirs {
			return nil, fmt.Errorf("more than %d directories are missing", mostDirs)
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, made.remove())
		}
	}()
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	defer func() {
		_, _ = unix.SetfsuidRetUid(0)
		_, _ = unix.SetfsgidRetGid(0)
	}()
	if _, err := unix.SetfsgidRetGid(int(gid)); err != nil {
		return nil, err
	}
	if _, err := unix.SetfsuidRetUid(int(uid)); err != nil {
		return nil, err
	}
	if err := within.MkdirAll(path.Dir(made.name), 0o755); err != nil {
		return nil, err
	}
	f, err := within.OpenFile(made.name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Chmod(os.FileMode(mode) & os.ModePerm); err != nil { // whatever the umask is
		return nil, err
	}
	made.is, err = f.Stat()
	return made, err
}

// remove removes the log if nobody has written to it, and the directories that were made for it as far as
// they are empty.
func (l *madeLog) remove() error {
	within, err := os.OpenRoot(l.root)
	if err != nil {
		return err
	}
	defer within.Close()
	if is, serr := within.Lstat(l.name); serr == nil && os.SameFile(is, l.is) && is.Size() == 0 {
		err = within.Remove(l.name)
	}
	for _, dir := range l.dirs {
		_ = within.Remove(dir) // somebody may use it
	}
	return err
}
