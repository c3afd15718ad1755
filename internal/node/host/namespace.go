// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"fmt"
	"os"
	"runtime"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// InMountNamespace runs do in the mount namespace of a process, on a thread that ends then.
func InMountNamespace(pid int, do func() error) error {
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the container's mount namespace: %w", err)
	}
	defer unix.Close(ns)
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("leave the shim's mount namespace: %w", err)
		}
		if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("enter the container's mount namespace: %w", err)
		}
		return do()
	})
}

// InNewMountNamespace runs do on a thread with a mount namespace of its own, a copy of this
// process's, that no mount comes into or out of. The namespace ends with the thread unless do
// keeps it open.
func InNewMountNamespace(do func() error) error {
	return onThread(func() error {
		err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err != nil {
			return fmt.Errorf("make a mount namespace: %w", err)
		}
		return do()
	})
}

// NewTmpfs makes a tmpfs that is mounted nowhere, with options and MOUNT_ATTR_ attributes: fsopen(2).
// It goes with the last descriptor of it.
func NewTmpfs(attributes int, options ...[2]string) (mount int, err error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	for _, o := range options {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return -1, err
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, err
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attributes)
}

// onThread runs do on a thread that ends afterwards, never the process's first: that would not end
// but stay where do has taken it, and /proc/self shows its mounts and cgroups to all.
func onThread(do func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			result <- onThread(do) // on another, since this one is taken
			runtime.UnlockOSThread()
			return
		}
		result <- do() // and not unlocked: the thread is of no more use
	}()
	return <-result
}

// OwnsNamespace reports whether a spec's namespace is the host's own, by its path: CRI writes that
// of a pod with the host's network into the specs of its containers.
func OwnsNamespace(ns specs.LinuxNamespace) bool {
	named := map[specs.LinuxNamespaceType]string{specs.NetworkNamespace: "net", specs.MountNamespace: "mnt"}
	given, err := os.Stat(ns.Path)
	if err != nil { // or it has none
		return false
	}
	own, err := os.Stat("/proc/self/ns/" + cmp.Or(named[ns.Type], string(ns.Type)))
	return err == nil && os.SameFile(given, own)
}

// HasFile reports whether there is something at a path.
func HasFile(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
