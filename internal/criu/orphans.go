// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// killTimeout bounds the wait for processes that were killed: SIGKILL needs no more
// than the kernel's time.
const killTimeout = 30 * time.Second

// endsByItself bounds the wait for a CRIU that dumps and has lost its runc. It ends at the next word
// that it has for runc, when the memory is copied at the latest.
const endsByItself = 20 * time.Second

// EndAll ends each CRIU of this process whose runc was killed. Such a CRIU would go
// on without runc and keep the processes that it dumps, which nobody else can trace
// until then.
func EndAll() error {
	return end(left(), forRunc)
}

// EndDumps is EndAll where nothing but dumps can be under way. Each CRIU gets time to end by itself
// before: one that is killed while its code is in a process takes the process with it.
func EndDumps() error {
	for late := time.Now().Add(endsByItself); len(left()) > 0 && time.Now().Before(late); {
		time.Sleep(time.Millisecond)
	}
	return EndAll()
}

// left returns the CRIUs of this process that live and whose runc does not.
func left() []int {
	return slices.DeleteFunc(proc.Children(os.Getpid()), func(pid int) bool {
		status, gone := proc.StatusOf(pid)
		return !forRunc(pid) || proc.Ended(gone) || status.Ended()
	})
}

// EndHalfRestored ends the processes of a container that CRIU has restored in part.
// They became children of this process when their runc was killed, after the watch
// began, and are in the container's cgroup from their begin, because runc puts CRIU
// there. cgroup returns the processes of the container's cgroup when a process is in
// it, and none otherwise.
func (w *Watch) EndHalfRestored(cgroup func(pid int) (pids []int, err error)) error {
	for _, pid := range proc.Children(os.Getpid()) {
		if slices.Contains(w.before, pid) {
			continue
		}
		pids, err := cgroup(pid)
		if err == nil {
			err = end(pids, func(pid int) bool {
				still, err := cgroup(pid)
				return err == nil && len(still) > 0
			})
		}
		if err != nil {
			return fmt.Errorf("end the half-restored container: %w", err)
		}
	}
	return nil
}

// EndOfDeadShim ends the CRIU of a shim that has died, in the container of a bundle: one that dumps its
// first process, which is to be killed, and CRIU may wait for it and it for CRIU; or one that has
// restored it in part, with what it has restored, and waits at a gate that nobody opens any more.
func EndOfDeadShim(dir string) error {
	if err := endHalfOfDeadShim(dir); err != nil {
		return fmt.Errorf("end the half-restored container: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "init.pid"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("read the container's process: %w", err)
	}
	threads, _ := proc.Threads(pid) // one that is gone has none
	for _, tid := range threads {
		status, _ := proc.ThreadStatus(pid, tid)
		if tracer := status.Tracer(); tracer != 0 && forRunc(tracer) {
			_ = proc.Signal(tracer, unix.SIGKILL, forRunc) // or it has ended
		}
	}
	return nil
}

// endHalfOfDeadShim ends all in the cgroup of a bundle's container if there is a CRIU that restores:
// runc has put it there.
func endHalfOfDeadShim(dir string) error {
	file, err := bundle.Read(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && (file.Spec.Linux == nil || file.Spec.Linux.CgroupsPath == "") {
		return nil
	}
	if err != nil {
		return err
	}
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return err
	}
	for _, at := range all {
		pid, err := strconv.Atoi(filepath.Base(at))
		if err != nil || !forRunc(pid) {
			continue
		}
		if cg, err := host.CgroupOf(pid); err == nil && cg.IsAt(file.Spec.Linux.CgroupsPath) {
			pids, err := cg.Pids()
			if err != nil {
				return err
			}
			return end(pids, cg.Has)
		}
	}
	return nil
}

// end kills those of the processes for which are returns true, and waits until they have ended.
func end(pids []int, are func(pid int) bool) error {
	pids = slices.DeleteFunc(pids, func(pid int) bool {
		ours := false
		_ = proc.Signal(pid, unix.SIGKILL, func(pid int) bool { // or it has ended
			ours = are(pid)
			return ours
		})
		return !ours
	})
	for end := time.Now().Add(killTimeout); ; time.Sleep(time.Millisecond) {
		pids = slices.DeleteFunc(pids, func(pid int) bool { // one whose parent is stopped is not waited for
			status, gone := proc.StatusOf(pid)
			return proc.Ended(gone) || status.Ended()
		})
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("processes %v of the failed attempt were killed and do not end", pids)
		}
	}
}

// RemoveMounts removes what a runc and a CRIU that were killed have left mounted for a
// restore: CRIU's view of the host's cgroups, in its work directory, and runc's view of
// the container's root, in its state directory. Who removed a directory with these in it
// would remove cgroups of the host and files of the container.
func RemoveMounts(workDir, state string) error {
	mounts, err := filepath.Glob(filepath.Join(workDir, ".criu.cgyard.*"))
	for _, at := range append(mounts, filepath.Join(state, "criu-root")) {
		err = errors.Join(err, removeMount(at))
	}
	_ = os.Remove(state) // if it is empty: runc refuses the name while it is there
	return err
}

func removeMount(at string) error {
	// CRIU and runc may end, and remove it, at the same time.
	if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount what CRIU has left: %s: %w", at, err)
	}
	if err := os.Remove(at); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
