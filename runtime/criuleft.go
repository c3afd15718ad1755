// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/host"
)

// removeHalf removes what a restore that failed may have left, if CRIU or runc was
// killed: CRIU, the container, half restored and waiting for CRIU, and mounts. before
// are the shim's children from before; runc's come to it when runc ends.
func (c *container) removeHalf(before []int) error {
	return joinBack(endCRIU(), c.endOrphans(before), removeMounts(c.workDir, c.runcState()))
}

// endCRIU ends each CRIU whose runc was killed. It would go on without, and has the
// processes that it dumps, which nobody else can have meanwhile; without it they go
// on.
func endCRIU() error {
	return end(slices.DeleteFunc(children(os.Getpid()), func(pid int) bool { return !forRunc(pid) }))
}

// endDeadCRIU ends the CRIU of a shim that died, which has a container's first
// process, that is to be killed: CRIU may wait for it, and it for CRIU.
func endDeadCRIU(bundle string) error {
	text, err := os.ReadFile(filepath.Join(bundle, "init.pid"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%s/task/*/status", text))
	for _, thread := range threads {
		if _, tracer := threadState(thread); tracer != 0 && forRunc(tracer) {
			_ = unix.Kill(tracer, unix.SIGKILL) // or it has ended
		}
	}
	return err
}

// end kills processes and waits until they have ended.
func end(pids []int) error {
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGKILL) // or it has ended
	}
	for end := time.Now().Add(killTimeout); ; time.Sleep(time.Millisecond) {
		pids = slices.DeleteFunc(pids, func(pid int) bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) })
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("processes %v of the failed attempt were killed and do not end", pids)
		}
	}
}

// endOrphans ends the processes of a half-restored container, which are in its cgroup
// from their begin: runc puts CRIU there.
func (c *container) endOrphans(before []int) error {
	for _, pid := range children(os.Getpid()) {
		if slices.Contains(before, pid) {
			continue
		}
		cg, err := host.CgroupOf(pid)
		if err != nil || !c.isCgroup(cg.Dir()) {
			continue // it has ended; or of another container, whose shim this is too
		}
		pids, err := cg.Pids()
		if err != nil {
			return fmt.Errorf("end the half-restored container: %w", err)
		}
		if err := end(pids); err != nil {
			return err
		}
	}
	return nil
}

// isCgroup says whether a cgroup is the container's, by its name: the last part of
// what the spec asks for, alone or, by systemd's rules, in "PREFIX-NAME.scope".
func (c *container) isCgroup(path string) bool {
	name := c.id
	if spec := c.restore.gpus.Spec; spec != nil && spec.Linux != nil && spec.Linux.CgroupsPath != "" {
		asked := spec.Linux.CgroupsPath
		name = asked[strings.LastIndexAny(asked, "/:")+1:]
	}
	is := filepath.Base(path)
	return name != "" && (is == name || strings.HasSuffix(is, "-"+name+".scope") || is == name+".scope")
}

// removeMounts removes what runc and CRIU have mounted for a restore, if they were
// killed: CRIU's view of the host's cgroups, in its work directory, and runc's of the
// container's root, in its state directory. With these the directories cannot be
// removed, nor the container's name be used again; and who tries removes what is in
// them, cgroups and the container's files.
func removeMounts(workDir, state string) error {
	mounts, err := filepath.Glob(filepath.Join(workDir, ".criu.cgyard.*"))
	for _, at := range append(mounts, filepath.Join(state, "criu-root")) {
		// Their own end may come between.
		if uerr := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); uerr != nil && !errors.Is(uerr, unix.EINVAL) && !errors.Is(uerr, unix.ENOENT) {
			err = joinBack(err, fmt.Errorf("unmount what CRIU has left: %s: %w", at, uerr))
			continue
		}
		if rerr := os.Remove(at); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
			err = joinBack(err, rerr)
		}
	}
	_ = os.Remove(state) // if it is empty: runc refuses the name while it is there
	return err
}
