// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package freeport gives tests ports for programs that begin later, or are restored.
package freeport

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
)

// Row returns the first of n ports in a row that no socket of this network has, by UDP or TCP, and that it gives to
// no other process, and no second time, while this one lives: those of a program that has not begun are free to the
// kernel. A connection gets none either: they are below the range for these (ip_local_port_range begins at 32768).
func Row(n int) (int, error) {
	const first, last = 10240, 32000
	for range 100 {
		port := first + rand.IntN(last-first-n) //nolint:gosec // no secret
		free := true
		for p := port; p < port+n && free; p++ {
			free = claim(p) && !inUse(p)
		}
		if free {
			return port, nil
		}
	}
	return 0, fmt.Errorf("find %d free ports in a row: there are none", n)
}

// claimed are the ports that are another's no more while this process lives.
var claimed sync.Map

// claim is an abstract Unix socket, of which each network has its own.
func claim(port int) bool {
	l, err := net.Listen("unix", "@gpuckpt-port-"+strconv.Itoa(port))
	if err == nil {
		claimed.Store(port, l)
	}
	return err == nil
}

// inUse reports whether a socket has the port, here or at its other end. It is read, not tried: a socket that tries
// a port keeps others from it, and swallows what is sent there, until the last child that was forked meanwhile has
// called exec.
func inUse(port int) bool {
	for _, kind := range []string{"udp", "udp6", "tcp", "tcp6"} {
		sockets, err := os.ReadFile("/proc/thread-self/net/" + kind)
		if err == nil && bytes.Contains(sockets, fmt.Appendf(nil, ":%04X ", port)) {
			return true
		}
	}
	return false
}
