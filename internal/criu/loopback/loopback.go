// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package loopback brings the loopback interface up in the network of a container that is restored.
//
// runc's init brings the interface up in a network namespace that runc makes, and does not
// run in a restore. With the interface down CRIU could not bind the sockets of a connection inside
// the container. So a hook of runc's brings it up when CRIU has made the namespace and no socket yet. In a
// namespace of the client's, a pod's, the interface is the client's.
package loopback

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
)

// hook is the name under which a program is the hook.
const hook = "gpuckpt-loopback"

// maxHookState bounds what is read of runc, in bytes.
const maxHookState = 1 << 20

// Hook adds the hook to the spec of a container to be restored. It is the program that CRIU runs as tar: the
// shim takes several times as long to start.
func Hook(spec *specs.Spec) error {
	if spec.Linux == nil || !slices.Contains(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace}) {
		return nil
	}
	program, err := tmpfs.Program()
	if err != nil {
		return err
	}
	if spec.Hooks == nil {
		spec.Hooks = new(specs.Hooks)
	}
	spec.Hooks.CreateRuntime = append(spec.Hooks.CreateRuntime, specs.Hook{Path: program, Args: []string{hook}})
	return nil
}

// IsHook reports whether this process is the hook: main then only calls Main.
func IsHook() bool { return len(os.Args) == 1 && os.Args[0] == hook }

// Main brings the loopback interface up in the network namespace of the container whose
// state is on standard input, and ends the program. runc shows its standard error if it fails.
func Main() {
	if err := up(os.Stdin); err != nil {
		fmt.Fprintf(os.Stderr, "bring the loopback interface up: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func up(state io.Reader) error {
	var s specs.State
	if err := json.NewDecoder(io.LimitReader(state, maxHookState)).Decode(&s); err != nil {
		return fmt.Errorf("read the container's state: %w", err)
	}
	if s.Pid <= 0 {
		return errors.New("the container's state has no process")
	}
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", s.Pid))
	if err != nil {
		return err
	}
	defer namespace.Close()
	runtime.LockOSThread() // the thread ends with the program, in that namespace
	if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("join the network namespace of process %d: %w", s.Pid, err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}
