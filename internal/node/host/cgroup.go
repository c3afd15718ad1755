// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package host is what the runtime uses of the machine that it runs on: cgroups, memory, mounts,
// and what the kernel kills first.
//
// The life of a Cgroup: runc makes it, CgroupOf finds it by a process in it, and runc removes it
// with the container. In between Freeze and Thaw may be called in any order. Both versions of
// cgroups are served, of a machine with both version 1.
package host

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/containerd/errdefs"
	occgroups "github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// unifiedRoot has cgroups of version 2, or directories of version 1's controllers by their names.
const unifiedRoot = "/sys/fs/cgroup"

// freezeTimeout bounds the wait for processes to freeze, each of which must leave the kernel first.
// runc waits as long (opencontainers/cgroups, fs2).
const freezeTimeout = 10 * time.Second

// freezePause is what the processes get to run between two tries of runc's.
const freezePause = 20 * time.Millisecond

// Cgroup is the cgroup of a container, of either version.
type Cgroup struct {
	v1 func() (cgroup1.Cgroup, error) // nil on a host with unified cgroups; reads all mounts once for each controller
	v2 *cgroup2.Manager               // nil on others
	// dir is the directory of the cgroup, in version 1 that of the freezer.
	dir string
}

// CgroupOf returns the cgroup of a process, as runc's service finds it. The error is
// errdefs.ErrNotFound for a process that is in none: one that has ended, which version 1 shows in
// the root, and who asked for the processes there would get all of the machine's.
func CgroupOf(pid int) (*Cgroup, error) {
	cg, err := cgroupOf(pid)
	if err == nil && filepath.Clean(cg.dir) == root(cg.Unified()) {
		err = fmt.Errorf("find the cgroup of process %d: it has ended: %w", pid, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	return cg, nil
}

// root is the directory of the cgroup that holds all others.
func root(unified bool) string {
	if unified {
		return unifiedRoot
	}
	return filepath.Join(unifiedRoot, "freezer")
}

func cgroupOf(pid int) (*Cgroup, error) {
	if cgroups.Mode() == cgroups.Unified {
		path, err := cgroup2.PidGroupPath(pid)
		if err != nil {
			return nil, fmt.Errorf("find the cgroup of process %d: %w", pid, err)
		}
		cg, err := cgroup2.Load(path)
		if err != nil {
			return nil, fmt.Errorf("load cgroup %s: %w", path, err)
		}
		return &Cgroup{v2: cg, dir: filepath.Join(unifiedRoot, path)}, nil
	}
	path, err := CgroupPath(pid, string(cgroup1.Freezer))
	if err != nil {
		return nil, err
	}
	top, err := freezerRoot()
	if err != nil {
		return nil, err
	}
	below, err := filepath.Rel(top, path)
	if err != nil {
		return nil, fmt.Errorf("find the freezer of process %d: %w", pid, err)
	}
	load := func() (cgroup1.Cgroup, error) { return cgroup1.Load(cgroup1.PidPath(pid)) }
	return &Cgroup{v1: sync.OnceValues(load), dir: filepath.Join(root(false), below)}, nil
}

// freezerRoot returns what of the hierarchy of version 1's freezer is mounted. It does not change.
var freezerRoot = sync.OnceValues(func() (string, error) {
	mounts, err := CgroupMounts()
	for _, m := range mounts {
		if slices.Contains(m.Subsystems, string(cgroup1.Freezer)) {
			return m.Root, nil
		}
	}
	return "", cmp.Or(err, errors.New("the freezer of cgroups is not mounted"))
})

// hierarchy returns the directory of a controller's hierarchy, and its name for CgroupPath.
func hierarchy(controller string) (root, name string) {
	if cgroups.Mode() == cgroups.Unified {
		return unifiedRoot, ""
	}
	return filepath.Join(unifiedRoot, controller), controller
}

// CgroupPath returns the cgroup of a process in the hierarchy of a controller, from the hierarchy's root; "" is the
// controller of version 2.
func CgroupPath(pid int, controller string) (string, error) {
	paths, err := occgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if path, has := paths[controller]; has || err != nil {
		return path, err
	}
	return "", fmt.Errorf("process %d has no cgroup of the controller %q", pid, controller)
}

// Dir returns the directory of the cgroup, in version 1 that of the freezer.
func (c *Cgroup) Dir() string { return c.dir }

// Unified reports whether the cgroup is of version 2.
func (c *Cgroup) Unified() bool { return c.v2 != nil }

// Pids returns the processes of the cgroup and of the cgroups in it, ascending.
func (c *Cgroup) Pids() ([]int, error) {
	pids, err := occgroups.GetAllPids(c.dir)
	if err != nil {
		return nil, fmt.Errorf("list the cgroup's processes: %w", err)
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// Has reports whether a process is in the cgroup, or in one below it.
func (c *Cgroup) Has(pid int) bool {
	pids, err := c.Pids()
	return err == nil && slices.Contains(pids, pid)
}

// Metrics returns the statistics of the cgroup in types that containerd's clients decode.
func (c *Cgroup) Metrics() (metrics any, err error) {
	if c.Unified() {
		metrics, err = c.v2.Stat()
	} else {
		var cg cgroup1.Cgroup
		if cg, err = c.v1(); err == nil {
			metrics, err = cg.Stat(cgroup1.IgnoreNotExist)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read the cgroup's statistics: %w", err)
	}
	return metrics, nil
}

// Freeze stops every process in the cgroup and returns once all have stopped. On an error some may
// be stopped. docs/decisions/0009-own-freezer.md explains why opencontainers/cgroups does not do.
func (c *Cgroup) Freeze() error {
	return c.setFreezer("FROZEN", "1", "frozen 1")
}

// Thaw lets the processes run on. In version 2 they may do so a moment later.
func (c *Cgroup) Thaw() error {
	return c.setFreezer("THAWED", "0", "")
}

// Kill kills every process in the frozen cgroup, and thaws it where it must be for that. They end a moment later.
// On an error some may live.
func (c *Cgroup) Kill() error {
	if c.Unified() {
		err := occgroups.WriteFile(c.dir, "cgroup.kill", "1")
		if !errors.Is(err, fs.ErrNotExist) { // Linux 5.14
			return err
		}
	}
	pids, err := c.Pids()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("kill process %d of cgroup %s: %w", pid, c.dir, err)
		}
	}
	return c.Thaw()
}

// RetryFreeze has runc freeze the container of a process, again while runc says that it could not, for
// freezeTimeout. With version 1 runc tries a thousand times, which are over on a busy machine before
// each process has had a turn to stop (opencontainers/cgroups, fs/freezer.go). runc has thawed the
// container then. No process is frozen between vfork and exec, if it does not stay there.
func RetryFreeze[R any](pid int, freeze func() (R, error)) (R, error) {
	for began := time.Now(); ; time.Sleep(freezePause) {
		answer, err := freeze()
		if cg, cerr := CgroupOf(pid); err == nil && cerr == nil {
			err = cg.freezeOutsideForks(forkPatience)
		}
		if err == nil || !strings.Contains(err.Error(), "unable to freeze") || time.Since(began) > freezeTimeout {
			return answer, err
		}
	}
}

// Frozen reports whether the cgroup's processes are stopped, or are to be.
func (c *Cgroup) Frozen() (bool, error) {
	file, thawed := "freezer.state", "THAWED"
	if c.Unified() {
		file, thawed = "cgroup.freeze", "0"
	}
	text, err := os.ReadFile(filepath.Join(c.dir, file))
	return strings.TrimSpace(string(text)) != thawed, err
}

func (c *Cgroup) setFreezer(v1, v2, event string) error {
	var err error
	if c.Unified() {
		// cgroup.freeze holds what was asked for, cgroup.events what is so.
		err = ask(filepath.Join(c.dir, "cgroup.freeze"), v2, filepath.Join(c.dir, "cgroup.events"), event, freezeTimeout)
	} else {
		file := filepath.Join(c.dir, "freezer.state")
		err = ask(file, v1, file, v1, freezeTimeout)
	}
	if err != nil {
		return fmt.Errorf("make cgroup %s %s: %w", c.dir, strings.ToLower(v1), err)
	}
	return nil
}

// ask writes a state into a freezer's file and waits until the file of answers has the answer; ""
// is not waited for. A file that is both, in version 1, is written to again each time: a process
// that was forked meanwhile may have missed it
// (Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst).
func ask(file, state, answers, answer string, timeout time.Duration) error {
	for began, asked := time.Now(), false; ; time.Sleep(time.Millisecond) {
		if !asked || file == answers {
			if err := os.WriteFile(file, []byte(state), 0); err != nil {
				return err
			}
			asked = true
		}
		if answer == "" {
			return nil
		}
		text, err := os.ReadFile(answers)
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			if strings.TrimSpace(line) == answer {
				return nil
			}
		}
		if time.Since(began) > timeout {
			return fmt.Errorf("it does not get there within %v: a process of the container is stuck in the kernel, or a cgroup above is frozen: %w",
				timeout, errdefs.ErrUnavailable)
		}
	}
}

// ThawIfKilled thaws the cgroup of a container whose first process was killed, and returns an error
// that says so. Version 1 holds those of its threads that had not ended when it froze, or all of them,
// and runc does not thaw a container that has ended.
func (c *Cgroup) ThawIfKilled(first int) error {
	if status, _ := proc.StatusOf(first); !status.Ended() && !status.Killed() {
		return nil
	}
	killed := errors.New("the container was killed meanwhile")
	if err := c.Thaw(); err != nil {
		return fmt.Errorf("%w; %w", killed, err)
	}
	return killed
}

// IsNamed reports whether the cgroup is that of a container, by its name: the last part of the path
// that the spec asks for (linux.cgroupsPath), or the container's id where it asks for none. It
// stands alone or, by systemd's rules, in "PREFIX-NAME.scope". A runc that was not told of systemd makes
// a directory "SLICE:PREFIX:NAME".
func (c *Cgroup) IsNamed(asked, id string) bool {
	name := id
	if asked != "" {
		name = asked[strings.LastIndexAny(asked, "/:")+1:]
	}
	is := filepath.Base(c.dir)
	return name != "" && (is == name || is == name+".scope" || strings.HasSuffix(is, "-"+name+".scope") || is == filepath.Base(asked))
}

// IsAt reports whether the cgroup is the one that a spec asks for (linux.cgroupsPath): a path, or,
// by systemd's rules, "SLICE:PREFIX:NAME".
func (c *Cgroup) IsAt(asked string) bool {
	if strings.Contains(asked, ":") {
		return c.IsNamed(asked, "")
	}
	return strings.HasSuffix(filepath.Clean(c.dir), filepath.Join("/", asked))
}

// IsSystemdPath reports whether a path of cgroups (linux.cgroupsPath) is one by systemd's rules, "SLICE:PREFIX:NAME".
func IsSystemdPath(asked string) bool {
	slice, _, _ := strings.Cut(asked, ":")
	return strings.Count(asked, ":") == 2 && strings.HasSuffix(slice, ".slice")
}

// RunsSystemd reports whether systemd runs this machine (sd_booted(3)).
func RunsSystemd() bool {
	_, err := os.Stat("/run/systemd/system")
	return err == nil
}

// RemoveCgroup removes the cgroup that a spec asks for (linux.cgroupsPath), and those in it, from all
// hierarchies. It is for one whose runc was killed before it could. It is no error if there is none, as
// where systemd has it, which removes it.
func RemoveCgroup(asked string) error {
	path := filepath.Join("/", asked)
	if path == "/" {
		return nil
	}
	roots := []string{unifiedRoot, filepath.Join(unifiedRoot, "unified")} // the second where both versions are
	mounts, err := CgroupMounts()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		roots = append(roots, m.Mountpoint)
	}
	for _, at := range roots {
		err = errors.Join(err, occgroups.RemovePath(filepath.Join(at, path)))
	}
	return err
}

// CgroupMounts returns where the hierarchies of version 1 are mounted.
func CgroupMounts() ([]occgroups.Mount, error) {
	if cgroups.Mode() == cgroups.Unified {
		return nil, nil
	}
	mounts, err := occgroups.GetCgroupMounts(true)
	if err != nil {
		return nil, fmt.Errorf("find the mounts of cgroups: %w", err)
	}
	return slices.DeleteFunc(mounts, func(m occgroups.Mount) bool { return len(m.Subsystems) == 0 }), nil
}

// RefuseForeign refuses held processes that pids, of the container's cgroup, does not list: the
// number of one that was killed may have become another's before it was held. A held process keeps
// its number.
func RefuseForeign(pids func() ([]int, error), held []int) error {
	now, err := pids()
	if err != nil {
		return err
	}
	for _, pid := range held {
		if slices.Contains(now, pid) {
			continue
		}
		if status, err := proc.StatusOf(pid); !proc.Ended(err) && !status.Ended() {
			return fmt.Errorf("process %d has left the container while it was paused", pid)
		}
	}
	return nil
}
