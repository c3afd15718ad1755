// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// FreePorts frees a port of a connection that has ended, and no other port; connections that a program has go on.
func TestFreePorts(t *testing.T) {
	for _, address := range []string{"127.0.0.1", "::1"} {
		t.Run(address, func(t *testing.T) {
			port, other := closedAt(t, address), closedAt(t, address)
			living, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
			if err != nil {
				t.Fatal(err)
			}
			defer living.Close()
			near, err := net.Dial("tcp", living.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer near.Close()
			far, err := living.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer far.Close()
			if err := near.(*net.TCPConn).CloseWrite(); err != nil { // FIN_WAIT2, and a program has it
				t.Fatal(err)
			}
			// At a port that no other connection has: the kernel gives one port to several destinations.
			own := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
			gone, err := own.DialContext(t.Context(), "tcp", living.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			kept, err := living.Accept()
			if err != nil {
				t.Fatal(err)
			}
			gone.Close()
			if _, err := kept.Read(make([]byte, 1)); err == nil {
				t.Fatal("the connection has not ended")
			}
			kept.Close() // the other end is in TIME_WAIT
			end := netip.MustParseAddrPort(gone.LocalAddr().String())
			ports := map[uint16]bool{port.Port(): true}
			for _, a := range []net.Addr{near.LocalAddr(), near.RemoteAddr()} {
				ports[netip.MustParseAddrPort(a.String()).Port()] = true
			}
			if _, err := bound(port); !errors.Is(err, unix.EADDRINUSE) {
				t.Fatalf("before, the port is %v: the test shows nothing", err)
			}
			if err := FreePorts("", ports); err != nil {
				t.Fatal(err)
			}
			s, err := bound(port)
			if err != nil {
				t.Errorf("the port is not free: %v", err)
			}
			unix.Close(s)
			if s, err = bound(end); err != nil {
				t.Errorf("the other end of a connection at the port: %v", err)
			}
			unix.Close(s)
			if _, err := bound(other); !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("another port: %v", err)
			}
			if _, err := far.Write([]byte("x")); err != nil {
				t.Error(err)
			}
			if n, err := near.Read(make([]byte, 1)); n != 1 {
				t.Errorf("a living connection reads %d bytes, %v", n, err)
			}
		})
	}
}

// A connection within the host of which the kernel has lost the FIN is waited for: it is sent again.
func TestFreePortsLostFIN(t *testing.T) {
	listener, err := bound(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(listener)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(name.(*unix.SockaddrInet4).Port))
	client, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Connect(client, name)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(client)
	accepted, _, err := unix.Accept(listener)
	if err != nil {
		t.Fatal(err)
	}
	nothing := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
	if err := unix.SetsockoptSockFprog(client, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing[0]}); err != nil {
		t.Fatal(err)
	}
	unix.Close(accepted) // its FIN is lost
	unix.Close(listener)
	if err := unix.SetsockoptInt(client, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0); err != nil {
		t.Fatal(err)
	}
	if err := FreePorts("", map[uint16]bool{at.Port(): true}); err != nil {
		t.Fatal(err)
	}
	s, err := bound(at)
	if err != nil {
		t.Errorf("the port is not free: %v", err)
	}
	unix.Close(s)
}

// closedAt returns the address of a listener that is gone, with a connection in TIME_WAIT.
func closedAt(t *testing.T, address string) netip.AddrPort {
	t.Helper()
	listener, err := bound(netip.AddrPortFrom(netip.MustParseAddr(address), 0))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(listener)
	name, err := unix.Getsockname(listener)
	if err != nil {
		t.Fatal(err)
	}
	var at netip.AddrPort
	switch n := name.(type) {
	case *unix.SockaddrInet4:
		at = netip.AddrPortFrom(netip.AddrFrom4(n.Addr), uint16(n.Port))
	case *unix.SockaddrInet6:
		at = netip.AddrPortFrom(netip.AddrFrom16(n.Addr), uint16(n.Port))
	}
	client, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	accepted, _, err := unix.Accept(listener)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(accepted)
	if _, err := client.Read(make([]byte, 1)); err == nil {
		t.Fatal("the connection has not ended")
	}
	client.Close()
	return at
}

// bound returns a socket that listens at an address, without SO_REUSEADDR, which the net package sets.
func bound(at netip.AddrPort) (int, error) {
	family, name := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()})
	if at.Addr().Is4() {
		family, name = unix.AF_INET, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	s, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(s, name)
	}
	if err == nil {
		err = unix.Listen(s, 8)
	}
	if err != nil {
		unix.Close(s)
	}
	return s, err
}
