// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"cmp"
	"errors"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/held"
)

// here is a gate that this process is at itself.
type here struct{}

func (here) Call(_ int, nr uint64, args ...uint64) error {
	var a [6]uint64
	copy(a[:], args)
	if _, _, errno := unix.Syscall6(uintptr(nr), uintptr(a[0]), uintptr(a[1]), uintptr(a[2]), uintptr(a[3]), uintptr(a[4]), uintptr(a[5])); errno != 0 {
		return errno
	}
	return nil
}

// What is written is read, and damaged lines are refused.
func TestParse(t *testing.T) {
	want := socket{
		pid: 7, fd: 3, values: map[option][]byte{{unix.IPPROTO_TCP, unix.TCP_NODELAY}: {1, 0, 0, 0}},
		groups: []group{{"eth0", netip.MustParseAddr("239.1.2.3")}, {"lo", netip.MustParseAddr("ff12::1")}},
	}
	var text strings.Builder
	write(&text, want)
	got, err := parse(strings.NewReader(text.String()))
	if err != nil || len(got) != 1 {
		t.Fatalf("%q is %v, %v", text.String(), got, err)
	}
	if s, ok := parseSocket(strings.Fields(got[0])); !ok || !reflect.DeepEqual(s, want) {
		t.Errorf("%q is %v, want %v", got[0], s, want)
	}
	for _, line := range []string{"7", "x 3", "7 -1", "7 3 6.1=", "7 3 6.1=xx", "7 3 6.9999=01", "7 3 6.1=" + strings.Repeat("00", maxValue+1), "7 3 10.0.0.1%eth0", "7 3 239.1.2.3%", "7 3 239.1.2.3", "7 3\n7 4\n7 3"} {
		if got, err := parse(strings.NewReader(line + "\n")); err == nil {
			t.Errorf("%q is %v", line, got)
		}
	}
}

// A socket gets what another one had, and what it cannot get is named.
func TestRestore(t *testing.T) {
	open := func() int {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	had, has := open(), open()
	const padding = "\x00\x00\x01\x04\x00\x00\x00\x00"
	if err := cmp.Or(unix.SetsockoptInt(had, unix.IPPROTO_IP, unix.IP_MULTICAST_TTL, 9), unix.SetsockoptString(had, unix.IPPROTO_IPV6, unix.IPV6_DSTOPTS, padding)); err != nil {
		t.Fatal(err)
	}
	s := socket{fd: has, values: readOptions(had), groups: []group{{"none", netip.MustParseAddr("10.0.0.1")}}}
	s.values[option{unix.SOL_SOCKET, unix.SO_PEEK_OFF}] = []byte{1}
	failed := s.restore(os.Getpid(), held.At(here{}), newNetworks())
	if len(failed) != 2 || !strings.Contains(failed[0].Error(), "SO_PEEK_OFF") || !strings.Contains(failed[1].Error(), "10.0.0.1%none") {
		t.Errorf("got %v", failed)
	}
	if ttl, err := unix.GetsockoptInt(has, unix.IPPROTO_IP, unix.IP_MULTICAST_TTL); err != nil || ttl != 9 {
		t.Errorf("the TTL is %d, %v", ttl, err)
	}
	if got, err := getsockopt(has, unix.IPPROTO_IPV6, unix.IPV6_DSTOPTS, make([]byte, maxValue)); err != nil || string(got) != padding {
		t.Errorf("IPV6_DSTOPTS is %q, %v", got, err)
	}
}

// What the kernel has set for a TCP connection is not noted of one that has ended either: no socket can be set to it.
func TestEndedConnection(t *testing.T) {
	listener, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	segment := option{unix.IPPROTO_TCP, unix.TCP_MAXSEG}
	if _, noted := readOptions(fd)[segment]; !noted {
		t.Error("before the connection the size of a segment is not noted")
	}
	to := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: listener.Addr().(*net.TCPAddr).Port}
	if err := unix.Connect(fd, to); err != nil {
		t.Fatal(err)
	}
	accepted, err := listener.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmp.Or(accepted.SetLinger(0), accepted.Close()); err != nil { // a reset
		t.Fatal(err)
	}
	if _, err := unix.Read(fd, make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Fatal(err)
	}
	if value, noted := readOptions(fd)[segment]; noted {
		t.Errorf("the size of a segment is noted: %v", value)
	}
}

// others are options that the test leaves out. CRIU restores them, or they have a meaning for connections alone, or
// they do not stay. IP_OPTIONS is no number.
var others = map[int][]int{
	unix.SOL_SOCKET: {
		unix.SO_REUSEADDR, unix.SO_DONTROUTE, unix.SO_BROADCAST, unix.SO_SNDBUF, unix.SO_RCVBUF, unix.SO_NO_CHECK, unix.SO_REUSEPORT,
		unix.SO_PASSCRED, unix.SO_PASSSEC, unix.SO_RCVLOWAT, unix.SO_MARK, unix.SO_BUF_LOCK,
		unix.SO_BINDTOIFINDEX,
	},
	unix.IPPROTO_IP:   {unix.IP_OPTIONS},
	unix.IPPROTO_IPV6: {unix.IPV6_V6ONLY},
	unix.IPPROTO_TCP:  {unix.TCP_CORK, unix.TCP_QUICKACK, unix.TCP_REPAIR, unix.TCP_REPAIR_QUEUE},
	unix.IPPROTO_UDP:  {unix.UDP_CORK}, unix.IPPROTO_UDPLITE: {unix.UDP_CORK},
}

// Each option of this kernel's that a program can set to a number, and read, is brought back.
func TestEachOption(t *testing.T) {
	for _, kind := range []struct{ family, kind, protocol int }{
		{unix.AF_UNIX, unix.SOCK_STREAM, 0}, {unix.AF_INET, unix.SOCK_DGRAM, 0}, {unix.AF_INET6, unix.SOCK_DGRAM, 0},
		{unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE}, {unix.AF_INET, unix.SOCK_STREAM, 0}, {unix.AF_INET6, unix.SOCK_STREAM, 0},
	} {
		open := func() int {
			fd, _ := unix.Socket(kind.family, kind.kind|unix.SOCK_CLOEXEC, kind.protocol)
			return fd
		}
		if fd := open(); fd >= 0 {
			unix.Close(fd)
		} else {
			continue // which this kernel has not
		}
		for _, level := range []int{unix.SOL_SOCKET, unix.IPPROTO_IP, unix.IPPROTO_IPV6, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE} {
			for number := range 96 {
				if slices.Contains(others[level], number) {
					continue
				}
				if kind.kind == unix.SOCK_STREAM && strings.Contains(options[option{level, number}], "MULTICAST") {
					continue
				}
				had, has := open(), open()
				for _, value := range []int{1, 0, 16} {
					before, err := unix.GetsockoptInt(had, level, number)
					if err != nil || unix.SetsockoptInt(had, level, number, value) != nil {
						continue
					}
					if after, err := unix.GetsockoptInt(had, level, number); err != nil || after == before {
						continue
					}
					s := socket{fd: has, values: make(fresh).without(had, readOptions(had))}
					failed := s.restore(os.Getpid(), held.At(here{}), newNetworks())
					want, _ := unix.GetsockoptInt(had, level, number)
					if got, err := unix.GetsockoptInt(has, level, number); err != nil || got != want {
						t.Errorf("%v, option %d of level %d: %d, want %d: %v %v", kind, number, level, got, want, err, failed)
					}
					break
				}
				unix.Close(had)
				unix.Close(has)
			}
		}
	}
}

// What sockets and groups there are does not take the product of both.
func TestManyGroups(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	all := newNetworks()
	n, err := all.network(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if again, err := all.network(os.Getpid()); err != nil || again != n {
		t.Errorf("one network is read for each process: %v", err)
	}
	n.joined = map[group]int{{"lo", netip.MustParseAddr("239.1.2.3")}: 1, {"lo", netip.MustParseAddr("239.1.2.4")}: 1}
	all.left = 3
	if groups, err := all.memberships(fd, n); err != nil || len(groups) > 0 {
		t.Errorf("it is in %v, %v", groups, err)
	}
	if _, err := all.memberships(fd, n); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("questions without end: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("7 3 6.1=01000000 239.1.2.3%eth0\n")
	f.Fuzz(func(_ *testing.T, text string) { _, _ = parse(strings.NewReader(text)) })
}
