// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package loopback brings the loopback interface up in the network of a container that is restored, and
// sets the sysctls there that the spec has.
//
// runc's init does both where runc makes the network namespace, and does not run in a restore. With the
// interface down CRIU could not bind the sockets of a connection inside the container. So a hook of runc's
// does it when CRIU has made the namespace and no socket yet. In a namespace of the client's, a pod's, the
// interface is the client's.
package loopback

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
)

const (
	// hook is the name under which a program is the hook.
	hook = "gpuckpt-loopback"
	// bringUp is its argument to bring the interface up. The others are sysctls, PATH=VALUE.
	bringUp = "up"
	// sysctls are the only ones that the hook sets, those of a network namespace: CRIU restores the others.
	sysctls = "net/"
)

// maxHookState bounds what is read of runc, in bytes.
const maxHookState = 1 << 20

// Hook adds the hook to the spec of a container to be restored. It is the program that CRIU runs as tar: the
// shim takes several times as long to start.
func Hook(spec *specs.Spec) error {
	if spec.Linux == nil {
		return nil
	}
	args := []string{hook}
	if slices.Contains(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace}) {
		args = append(args, bringUp)
	}
	for name, value := range spec.Linux.Sysctl {
		if path := strings.ReplaceAll(name, ".", "/"); strings.HasPrefix(path, sysctls) {
			args = append(args, path+"="+value)
		}
	}
	if len(args) == 1 {
		return nil
	}
	program, err := tmpfs.Program()
	if err != nil {
		return err
	}
	if spec.Hooks == nil {
		spec.Hooks = new(specs.Hooks)
	}
	spec.Hooks.CreateRuntime = append(spec.Hooks.CreateRuntime, specs.Hook{Path: program, Args: args})
	return nil
}

// IsHook reports whether this process is the hook: main then only calls Main.
func IsHook() bool { return os.Args[0] == hook }

// Main does what the arguments say in the network namespace of the container whose state is on standard
// input, and ends the program. runc shows its standard error if it fails.
func Main() {
	if err := set(os.Stdin, os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "set up the restored network: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func set(state io.Reader, args []string) error {
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
	for _, arg := range args {
		path, value, setting := strings.Cut(arg, "=")
		if setting {
			err = write(path, value)
		} else {
			err = up()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// write sets a sysctl of the network namespace that the thread is in: the kernel shows each its own.
func write(path, value string) error {
	if !filepath.IsLocal(path) || !strings.HasPrefix(filepath.Clean(path), sysctls) {
		return fmt.Errorf("%s is no sysctl of a network", path)
	}
	file, err := os.OpenFile(filepath.Join("/proc/sys", path), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(value)
	return errors.Join(err, file.Close())
}

// up brings the interface up.
func up() error {
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
