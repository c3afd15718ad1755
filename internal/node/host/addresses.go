// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Addresses returns the addresses of all interfaces in a network namespace, by its path; "" is the
// shim's own.
func Addresses(namespace string) (found []netip.Addr, err error) {
	err = InNetwork(namespace, func() (err error) {
		found, err = addresses()
		return err
	})
	return found, err
}

// Interfaces returns the numbers of the interfaces in a network namespace, by their names, as Addresses does.
func Interfaces(namespace string) (numbers map[string]int, err error) {
	numbers = make(map[string]int)
	err = InNetwork(namespace, func() error {
		all, err := net.Interfaces()
		for _, i := range all {
			numbers[i.Name] = i.Index
		}
		return err
	})
	return numbers, err
}

// FirstPort returns the first port that anybody may bind in a network namespace, by its path; "" is the shim's
// own. CRI sets it in a pod's.
func FirstPort(namespace string) (first uint32, err error) {
	err = setting(namespace, "ip_unprivileged_port_start", &first)
	return first, err
}

// PingGroups returns the first and the last group that may make sockets of ping in a network namespace, as FirstPort
// does. CRI allows all in a pod's. Where the first is above the last there are none.
func PingGroups(namespace string) (first, last uint32, err error) {
	err = setting(namespace, "ping_group_range", &first, &last)
	return first, last, err
}

// setting reads numbers of IPv4's in a network namespace.
func setting(namespace, name string, to ...any) error {
	return InNetwork(namespace, func() error {
		text, err := os.ReadFile("/proc/sys/net/ipv4/" + name) // of the thread's namespace
		if err == nil {
			_, err = fmt.Sscan(string(text), to...)
		}
		return err
	})
}

// InNetwork calls a function in a network namespace, by its path; "" is the shim's own.
func InNetwork(namespace string, do func() error) error {
	if namespace == "" {
		return do()
	}
	ns, err := unix.Open(namespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the network namespace %s: %w", namespace, err)
	}
	defer unix.Close(ns)
	return onThread(func() error {
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network namespace %s: %w", namespace, err)
		}
		return do()
	})
}

// addresses returns those of the thread's network namespace.
func addresses() ([]netip.Addr, error) {
	list, err := net.InterfaceAddrs() // asks by a socket of this thread's
	if err != nil {
		return nil, fmt.Errorf("list network addresses: %w", err)
	}
	all := make([]netip.Addr, 0, len(list))
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				all = append(all, addr.Unmap())
			}
		}
	}
	return all, nil
}
