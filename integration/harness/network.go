// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// envNetwork names the network namespace that a program is in on purpose.
const envNetwork = "GPUCKPT_TEST_NETWORK"

// InOwnNetwork starts the program over, once, in a network namespace of its own, in
// which nothing but the loopback interface is and which all that it starts shares,
// with an empty directory in the place of each of those given. Bridges, packet
// filters and net.* settings that are made there are not the machine's, nor is what
// is written into the directories, and all ends with the last process there, also
// after a SIGKILL. To be called first in main or TestMain, as root; it returns in the
// new namespace. After an error the program is to end.
func InOwnNetwork(directories ...string) error {
	here, err := os.Readlink("/proc/thread-self/ns/net")
	if err == nil && os.Getenv(envNetwork) == here {
		return nil
	}
	if err == nil {
		err = restartApart(directories)
	}
	return fmt.Errorf("enter a network namespace: %w", err)
}

// restartApart executes the program again in namespaces of its own, and returns only
// with an error.
func restartApart(directories []string) error {
	// A namespace is a thread's, and a program that is executed goes on in those of
	// the thread that called for it.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("bring the loopback interface up: %w", err)
	}
	// What the machine unmounts is unmounted here as well, and not the reverse.
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep mounts apart: %w", err)
	}
	covered := make(map[string]bool)
	for _, dir := range directories {
		if err := ownDirectory(dir, covered); err != nil {
			return err
		}
		if err := unix.Mount("gpuckpt-test", dir, "tmpfs", 0, "mode=755"); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	here, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	if err := os.Setenv(envNetwork, here); err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	return syscall.Exec(program, os.Args, os.Environ())
}

// ownDirectory makes a directory that the machine does not have, in this mount namespace alone: below
// an overlay, which covered notes.
func ownDirectory(dir string, covered map[string]bool) error {
	there := dir
	for {
		if _, err := os.Stat(there); err == nil {
			break
		}
		there = filepath.Dir(there)
	}
	if there == dir {
		return nil
	}
	if !covered[there] {
		if _, err := Cover(there); err != nil {
			return err
		}
		covered[there] = true
	}
	return os.MkdirAll(dir, 0o755)
}

// NewNetwork makes a network namespace with a loopback interface and mounts it at a path, as a pod's
// is. It is gone with the mount and with the last process in it. On error there is no file.
func NewNetwork(path string) error {
	if err := os.WriteFile(path, nil, 0o400); err != nil {
		return fmt.Errorf("make a network namespace: %w", err)
	}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread, which is in that namespace, ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = loopbackUp()
		}
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		made <- err
	}()
	if err := <-made; err != nil {
		return errors.Join(fmt.Errorf("make a network namespace: %w", err), os.Remove(path))
	}
	return nil
}

// BridgeAddress is for a bridge that Connect uses. Without one of its own it has that of one of its devices, and
// another when devices come and go: who has that in mind loses packets for seconds.
const BridgeAddress = "02:00:0a:4d:00:01"

// Connect gives a network namespace, that of a process, an interface eth0 with an address such as
// "10.1.2.3/24". The interface is one end of a cable, device the other, in a bridge here. Both go with the
// namespace.
func Connect(pid int, bridge, address string) (device string, err error) {
	namespace := strconv.Itoa(pid)
	device = "m" + namespace
	inside := []string{"--target", namespace, "--net", "ip"}
	for _, command := range [][]string{
		{"ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", namespace},
		{"ip", "link", "set", device, "master", bridge, "up"},
		append([]string{"nsenter"}, append(inside, "link", "set", "lo", "up")...),
		append([]string{"nsenter"}, append(inside, "address", "add", address, "dev", "eth0")...),
		append([]string{"nsenter"}, append(inside, "link", "set", "eth0", "up")...),
	} {
		if err := Program(command[0], command[1:]...); err != nil {
			return "", fmt.Errorf("connect a machine: %w", err)
		}
	}
	return device, nil
}

// Program runs a program of this machine. Its error has what the program wrote.
func Program(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// loopbackUp brings the loopback interface up, as it is on any machine.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}
