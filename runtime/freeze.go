// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/errdefs"
)

// freezeTimeout bounds the wait for processes to freeze, each of which must
// leave the kernel first. runc waits as long (libcontainer/cgroups/fs2).
const freezeTimeout = 10 * time.Second

// freeze stops every process in the cgroup and returns once they have stopped. On
// an error they may be stopped in part.
func (c *cgroup) freeze() error {
	if c.v2 == nil {
		return awaitFreezer(filepath.Join(c.path, "freezer.state"), "FROZEN", freezeTimeout)
	}
	if err := c.v2.Freeze(); err != nil {
		return fmt.Errorf("freeze cgroup: %w", err)
	}
	// cgroup.freeze says what was asked for, cgroup.events what is so.
	events := filepath.Join("/sys/fs/cgroup", c.path, "cgroup.events")
	for end := time.Now().Add(freezeTimeout); ; time.Sleep(time.Millisecond) {
		text, err := os.ReadFile(events)
		if err != nil {
			return fmt.Errorf("freeze cgroup: %w", err)
		}
		if strings.Contains(string(text), "frozen 1") {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("freeze cgroup: a process in %s does not freeze within %v: %w", c.path, freezeTimeout, errdefs.ErrUnavailable)
		}
	}
}

// thaw lets them run on.
func (c *cgroup) thaw() error {
	if c.v2 == nil {
		return awaitFreezer(filepath.Join(c.path, "freezer.state"), "THAWED", freezeTimeout)
	}
	if err := c.v2.Thaw(); err != nil {
		return fmt.Errorf("thaw cgroup: %w", err)
	}
	return nil
}

// letEnd thaws the cgroup of a container that was killed, and says so: version 1
// holds those of its threads that had not ended when it froze, and runc, to which the
// container has ended with its first, does not thaw it any more.
func (c *cgroup) letEnd(first int) error {
	if dead, _ := threadState(fmt.Sprintf("/proc/%d/status", first)); !dead {
		return nil
	}
	return joinBack(errors.New("the container was killed meanwhile"), c.thaw())
}

// awaitFreezer asks a freezer of version 1 for a state until it has it: a process
// that was forked meanwhile may have missed it (Documentation/admin-guide/
// cgroup-v1/freezer-subsystem.rst). The library's own wait has no end.
func awaitFreezer(file, state string, timeout time.Duration) error {
	for end := time.Now().Add(timeout); ; time.Sleep(time.Millisecond) {
		if err := os.WriteFile(file, []byte(state), 0o600); err != nil {
			return fmt.Errorf("ask the freezer for %s: %w", state, err)
		}
		is, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("read the freezer: %w", err)
		}
		if strings.TrimSpace(string(is)) == state {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s does not get to be %s within %v: a process of the container is stuck in the kernel, or a cgroup above is frozen: %w",
				filepath.Dir(file), state, timeout, errdefs.ErrUnavailable)
		}
	}
}

// freezerOf gives the directory of a process's freezer, cgroup version 1.
func freezerOf(pid int) (string, error) {
	path, err := cgroup1.PidPath(pid)(cgroup1.Freezer)
	if err != nil {
		return "", err
	}
	all, err := cgroup1.Default()
	if err != nil {
		return "", err
	}
	for _, s := range all {
		if at, ok := s.(interface{ Path(path string) string }); ok && s.Name() == cgroup1.Freezer {
			return at.Path(path), nil
		}
	}
	return "", fmt.Errorf("no hierarchy of cgroups has a freezer: %w", errdefs.ErrUnavailable)
}
