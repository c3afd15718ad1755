// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package names

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	skunix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const (
	socketFile  = 0x89e0 // SIOCUNIXFILE of linux/un.h
	longestName = 107    // of an address
	established = 1      // include/net/tcp_states.h
	skipped     = ""
)

// Sockets has a dump, whose processes still stand still, bind each Unix socket that was renamed after it
// was bound, or linked to another name, to the name that it has now, one of a name with "..", to the
// name without, and one of a process in a chroot, to its name outside. The kernel goes on telling CRIU the old one. It
// refuses a socket whose name is not found.
func Sockets(ctx context.Context, dumped *image.Set, pids func() ([]int, error)) error {
	bound := make(map[uint32]*skunix.UnixSkEntry)
	err := image.EachOf(dumped, filesImage, func(f *fdinfo.FileEntry) error {
		if s := f.GetUsk(); s != nil && len(s.GetName()) > 0 && s.GetName()[0] != 0 &&
			(s.GetType() == unix.SOCK_DGRAM || s.GetState() != established) {
			bound[s.GetIno()] = s
		}
		return nil
	})
	if err != nil || len(bound) == 0 {
		return err
	}
	list, err := pids()
	if err != nil {
		return err
	}
	renamed := make(map[uint32]string)
	for _, pid := range list {
		sockets, err := proc.Sockets(pid)
		if err != nil && !proc.Ended(err) {
			return err
		}
		for fd, inode := range sockets {
			s := bound[uint32(inode)]
			if s == nil {
				continue
			}
			delete(bound, s.GetIno())
			was := path.Join("/", s.GetNameDir(), strings.TrimSuffix(string(s.GetName()), "\x00"))
			is, err := nameOf(ctx, pid, fd, was)
			if err != nil {
				return err
			}
			if is == skipped && !s.GetDeleted() && strings.Contains(string(s.GetName()), "/../") {
				is = was // the same without "..", which a restore refuses: it may lead elsewhere there
			}
			if len(is) > longestName {
				return fmt.Errorf("the Unix socket %s of process %s was renamed to a name of %d bytes, and an address has %d: give it a shorter name: %w",
					was, proc.Describe(pid), len(is), longestName, errdefs.ErrFailedPrecondition)
			}
			if is != skipped {
				renamed[s.GetIno()] = is
			}
		}
	}
	if len(renamed) == 0 {
		return nil
	}
	return image.EditOf(dumped, filesImage, func(f *fdinfo.FileEntry) error {
		if s := f.GetUsk(); s != nil && renamed[s.GetIno()] != "" {
			s.Name, s.NameDir, s.Deleted = []byte(renamed[s.GetIno()]+"\x00"), nil, nil
		}
		return nil
	})
}

// nameOf returns the name that the file of a process's socket has for the container's first process, if the name
// by which it was bound no longer leads there, or leads there in a chroot, where CRIU does not bind it.
func nameOf(ctx context.Context, pid, fd int, bound string) (string, error) {
	s, err := proc.CopyOf(pid, fd)
	if err != nil {
		return skipped, err
	}
	defer unix.Close(s)
	file, err := unix.IoctlRetInt(s, socketFile)
	if err != nil {
		return skipped, nil // a kernel without it, or a socket that is not bound any more
	}
	defer unix.Close(file)
	var own, st unix.Stat_t
	if err := unix.Fstat(file, &own); err != nil {
		return skipped, err
	}
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return skipped, err
	}
	defer unix.Close(root)
	above, err := os.Readlink(fmt.Sprintf("/proc/%d/root", pid))
	if err != nil {
		return skipped, err
	}
	found, err := proc.Openat2(root, bound, &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if err == nil {
		err = unix.Fstat(found, &st)
		unix.Close(found)
		if err != nil || inodeOf(&own) == inodeOf(&st) && above == "/" {
			return skipped, err
		}
	}
	is, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", file))
	if err != nil {
		return skipped, err
	}
	rest, below := strings.CutPrefix(is, strings.TrimSuffix(above, "/")+"/")
	switch {
	case !strings.HasSuffix(is, " (deleted)"):
		return is, nil
	case own.Nlink == 0:
		return skipped, nil
	case below: // where links lead to, as /var/run does
		bound = "/" + rest
	}
	name, err := linkedName(ctx, pid, path.Dir(bound), inodeOf(&own))
	if err != nil {
		return skipped, err
	}
	return path.Join(above, name), nil
}

// linkedName returns another name of the file of a socket, near to the one by which it was bound.
func linkedName(ctx context.Context, pid int, near string, at inode) (string, error) {
	for _, place := range []string{near, "/"} {
		found, err := find(ctx, pid, place, map[inode]bool{at: true}, unix.PathMax)
		if err != nil && !errors.Is(err, fs.ErrNotExist) || found[at] != "" {
			return found[at], err
		}
	}
	return skipped, fmt.Errorf("a Unix socket of process %s was bound below %s, and what it is called now is not found: have the program bind it by the name that it is to have: %w",
		proc.Describe(pid), near, errdefs.ErrFailedPrecondition)
}
