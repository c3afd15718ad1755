// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hung refuses a checkpoint of a container with a file system that does not answer: one whose
// server is a program (FUSE) or another node (NFS). CRIU asks it for the status of files, and the
// container would stand still until CRIU's time is over.
package hung

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// patience is how long a file system may take for an answer.
const patience = 5 * time.Second

// served are types of file systems that wait for a server, beside those that begin with fuse.
var served = []string{"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "afs", "lustre", "virtiofs"}

// asked are the file systems that have been asked and have not answered yet, by the device that they are.
// Each takes a thread of this process, which the kernel holds.
var asked = struct {
	sync.Mutex
	answers map[string]chan struct{}
}{answers: make(map[string]chan struct{})}

// Refuse asks each such file system of a process's mount namespace, all at the same time.
func Refuse(pid int) error {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if proc.Ended(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	mounts, err := read(f)
	if proc.Ended(err) || err == nil && len(mounts) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	answers := make([]chan struct{}, len(mounts))
	for i, m := range mounts {
		answers[i] = ask(pid, m)
	}
	over := time.After(patience)
	var failed error
	for i, m := range mounts {
		select {
		case <-answers[i]:
			continue
		default:
		}
		select {
		case <-answers[i]:
		case <-over:
			over = time.After(0) // the others had as long
			failed = errors.Join(failed, fmt.Errorf("the file system at %s (%s, %s) does not answer: let its server continue, or unmount it: %w", m.Mountpoint, m.FSType, m.Source, errdefs.ErrFailedPrecondition))
		}
	}
	return failed
}

// most bounds the mounts that are asked.
const most = 512

// read returns the mounts of such file systems.
func read(from io.Reader) (mounts []*mountinfo.Info, err error) {
	n := 0
	mounts, err = mountinfo.GetMountsFromReader(from, func(m *mountinfo.Info) (skip, stop bool) {
		if skip = !strings.HasPrefix(m.FSType, "fuse") && !slices.Contains(served, m.FSType); !skip {
			n++
		}
		return skip, n > most
	})
	if n > most {
		return nil, fmt.Errorf("the container has more than %d mounts of file systems with a server (FUSE, NFS): unmount some: %w", most, errdefs.ErrFailedPrecondition)
	}
	return mounts, err
}

// ask returns what is closed when a file system has answered, with an error or not.
func ask(pid int, m *mountinfo.Info) chan struct{} {
	asked.Lock()
	defer asked.Unlock()
	device := fmt.Sprint(m.Major, ":", m.Minor)
	if answer, waits := asked.answers[device]; waits {
		return answer
	}
	answer := make(chan struct{})
	asked.answers[device] = answer
	go func() {
		look(pid, m.Mountpoint)
		asked.Lock()
		defer asked.Unlock()
		delete(asked.answers, device)
		close(answer)
	}()
	return answer
}

// look asks for the status of a file system, of which nobody keeps an answer.
func look(pid int, at string) {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(root)
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT}
	fd, err := proc.Openat2(root, at, how)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	var st unix.Statfs_t
	_ = unix.Fstatfs(fd, &st)
}
