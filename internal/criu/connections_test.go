// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A connection that is held takes nothing, and what was sent meanwhile when it is released; one that a killed CRIU
// has left in TCP_REPAIR is released as well. A filter that the program has itself stays.
func TestHoldConnections(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for TCP_REPAIR")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	connect := func() (s int, peer net.Conn) {
		t.Helper()
		conn, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		file, err := conn.(*net.TCPConn).File()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
		if peer, err = listener.Accept(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { peer.Close() })
		return int(file.Fd()), peer
	}
	received := func(s int) int {
		t.Helper()
		n, err := unix.IoctlGetInt(s, unix.SIOCINQ)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	s, peer := connect()
	own, _ := connect()
	all := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 16}
	if err := unix.SetsockoptSockFprog(own, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &all}); err != nil {
		t.Fatal(err)
	}
	HoldConnections([]int{os.Getpid()})
	if err := unix.SetsockoptInt(s, unix.IPPROTO_TCP, unix.TCP_REPAIR, unix.TCP_REPAIR_ON); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if n := received(s); n > 0 {
		t.Errorf("a connection that is held has received %d bytes", n)
	}
	ReleaseConnections([]int{os.Getpid()})
	if is, err := unix.GetsockoptInt(s, unix.IPPROTO_TCP, unix.TCP_REPAIR); err != nil || is != 0 {
		t.Errorf("TCP_REPAIR is %d, error %v", is, err)
	}
	for end := time.Now().Add(time.Minute); received(s) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("what was sent meanwhile does not come")
		}
	}
	if filter, n := filterOf(own); n != 1 || filter[0] != all {
		t.Errorf("the program's own filter is %v, of %d instructions", filter, n)
	}
}
