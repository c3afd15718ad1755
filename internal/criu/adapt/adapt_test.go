// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	packetsock "github.com/checkpoint-restore/go-criu/v8/crit/images/packet-sock"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	skopts "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-opts"
	skunix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/timerfd"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// wordsOf returns an address as CRIU writes it for a socket of a family.
func wordsOf(a netip.Addr, v6 bool) (words []uint32) {
	b := a.AsSlice()
	if v6 {
		all := a.As16()
		b = all[:]
	}
	for ; len(b) > 0; b = b[4:] {
		words = append(words, binary.LittleEndian.Uint32(b))
	}
	return words
}

// socket returns the entry of a socket, "10.0.0.1:80 10.0.0.2:1234"; one without a second address
// listens. An IPv4 address that is written as IPv6 is in an IPv6 socket.
func socket(kind uint32, from, to string) *fdinfo.FileEntry {
	src, dst := netip.MustParseAddrPort(from), netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	state := uint32(unix.BPF_TCP_LISTEN)
	v6 := src.Addr().Is6()
	if v6 {
		dst = netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
	}
	if to != "" {
		dst, state = netip.MustParseAddrPort(to), 1
		v6 = v6 || dst.Addr().Is6()
	}
	return &fdinfo.FileEntry{Isk: &skinet.InetSkEntry{
		Proto: new(kind), State: &state, NsId: new(uint32(9)),
		SrcPort: new(uint32(src.Port())), SrcAddr: wordsOf(src.Addr(), v6),
		DstPort: new(uint32(dst.Port())), DstAddr: wordsOf(dst.Addr(), v6),
	}}
}

// halfClosed returns the entry of a connection whose other end has closed.
func halfClosed(f *fdinfo.FileEntry) *fdinfo.FileEntry {
	f.Isk.State = new(uint32(unix.BPF_TCP_CLOSE_WAIT))
	return f
}

func text(f *fdinfo.FileEntry) string {
	s := f.GetIsk()
	if s.GetState() == unix.BPF_TCP_CLOSE {
		return fmt.Sprintf("closed %d %d %d %d", s.GetSrcPort(), s.GetDstPort(), s.SrcAddr, s.DstAddr)
	}
	return fmt.Sprintf("%s %s in %d words", source(s), destination(s), len(s.SrcAddr))
}

func addresses(list ...string) (all []netip.Addr) {
	all = []netip.Addr{}
	for _, a := range list {
		all = append(all, netip.MustParseAddr(a))
	}
	return all
}

// edited returns the entries after a Plan of all of them has edited each.
func edited(t *testing.T, place Place, files ...*fdinfo.FileEntry) (texts []string) {
	t.Helper()
	p := Make(place, files)
	closed := 0
	for _, f := range files {
		if p.Edit(f); f.GetIsk() != nil {
			texts = append(texts, text(f))
		}
		if f.GetIsk().GetState() == unix.BPF_TCP_CLOSE {
			closed++
		}
	}
	if len(p.Closed) != closed {
		t.Errorf("%d connections are closed, and the plan has %q", closed, p.Closed)
	}
	return texts
}

func TestConnections(t *testing.T) {
	const tcp, udp = unix.IPPROTO_TCP, unix.IPPROTO_UDP
	moved := Place{Connections: true, Moves: true, Addresses: addresses("127.0.0.1", "::1", "10.0.0.9", "fe80::1", "fd00::9")}
	elsewhere := moved
	elsewhere.Moves = false
	two := moved
	two.Addresses = addresses("10.0.0.8", "10.0.0.9")
	for _, test := range []struct {
		name  string
		place Place
		files []*fdinfo.FileEntry
		want  []string
	}{
		{"loopback", moved, []*fdinfo.FileEntry{socket(tcp, "127.0.0.1:80", "127.0.0.1:5000"), socket(tcp, "127.0.0.1:5000", "127.0.0.1:80")},
			[]string{"127.0.0.1:80 127.0.0.1:5000 in 1 words", "127.0.0.1:5000 127.0.0.1:80 in 1 words"}},
		{"one end", moved, []*fdinfo.FileEntry{socket(tcp, "127.0.0.1:80", "127.0.0.1:5000")}, []string{"closed 0 0 [0] [0]"}},
		{"one end, the other one was closed here", moved, []*fdinfo.FileEntry{halfClosed(socket(tcp, "127.0.0.1:80", "127.0.0.2:5000")), halfClosed(socket(tcp, "10.0.0.1:80", "10.0.0.1:5000")), halfClosed(socket(tcp, "10.0.0.1:80", "10.0.0.2:5000"))},
			[]string{"127.0.0.1:80 127.0.0.2:5000 in 1 words", "10.0.0.9:80 10.0.0.9:5000 in 1 words", "closed 0 0 [0] [0]"}},
		{"one end, without a state", Place{Connections: true, Closed: true}, []*fdinfo.FileEntry{halfClosed(socket(tcp, "127.0.0.1:80", "127.0.0.1:81"))}, []string{"closed 0 0 [0] [0]"}},
		{"another port", moved, []*fdinfo.FileEntry{socket(tcp, "127.0.0.1:80", "127.0.0.1:5000"), socket(tcp, "127.0.0.1:5001", "127.0.0.1:80")},
			[]string{"closed 0 0 [0] [0]", "closed 0 0 [0] [0]"}},
		{"elsewhere", moved, []*fdinfo.FileEntry{socket(tcp, "10.0.0.1:5000", "93.184.216.34:443")}, []string{"closed 0 0 [0] [0]"}},
		{"the pod's address", moved, []*fdinfo.FileEntry{socket(tcp, "10.0.0.1:80", "10.0.0.1:5000"), socket(tcp, "10.0.0.1:5000", "10.0.0.1:80"), socket(tcp, "10.0.0.1:80", "")},
			[]string{"10.0.0.9:80 10.0.0.9:5000 in 1 words", "10.0.0.9:5000 10.0.0.9:80 in 1 words", "10.0.0.9:80 0.0.0.0:0 in 1 words"}},
		{"the same address", moved, []*fdinfo.FileEntry{socket(tcp, "10.0.0.9:80", "10.0.0.9:5000"), socket(tcp, "10.0.0.9:5000", "10.0.0.9:80")},
			[]string{"10.0.0.9:80 10.0.0.9:5000 in 1 words", "10.0.0.9:5000 10.0.0.9:80 in 1 words"}},
		{"IPv6", moved, []*fdinfo.FileEntry{socket(tcp, "[fd00::1]:80", "[fd00::1]:5000"), socket(tcp, "[fd00::1]:5000", "[fd00::1]:80")},
			[]string{"[fd00::9]:80 [fd00::9]:5000 in 4 words", "[fd00::9]:5000 [fd00::9]:80 in 4 words"}},
		{"one end in an IPv6 socket", moved, []*fdinfo.FileEntry{socket(tcp, "[::ffff:10.0.0.1]:80", "[::ffff:10.0.0.1]:5000"), socket(tcp, "10.0.0.1:5000", "10.0.0.1:80")},
			[]string{"10.0.0.9:80 10.0.0.9:5000 in 4 words", "10.0.0.9:5000 10.0.0.9:80 in 1 words"}},
		{"a host's address that is not here", elsewhere, []*fdinfo.FileEntry{socket(tcp, "10.0.0.1:80", "10.0.0.1:5000"), socket(tcp, "10.0.0.1:5000", "10.0.0.1:80")},
			[]string{"closed 0 0 [0] [0]", "closed 0 0 [0] [0]"}},
		{"a forged end elsewhere", elsewhere, []*fdinfo.FileEntry{socket(tcp, "10.0.0.9:22", "10.0.0.7:5000"), socket(tcp, "10.0.0.7:5000", "10.0.0.9:22")},
			[]string{"closed 0 0 [0] [0]", "closed 0 0 [0] [0]"}},
		{"two new addresses", two, []*fdinfo.FileEntry{socket(tcp, "10.0.0.1:80", "10.0.0.1:5000"), socket(tcp, "10.0.0.1:5000", "10.0.0.1:80"), socket(tcp, "10.0.0.1:80", "")},
			[]string{"closed 0 0 [0] [0]", "closed 0 0 [0] [0]", "10.0.0.1:80 0.0.0.0:0 in 1 words"}},
		{"a namespace that is made", Place{Connections: true, Moves: true}, []*fdinfo.FileEntry{socket(tcp, "10.0.0.1:80", "10.0.0.1:5000"), socket(tcp, "10.0.0.1:5000", "10.0.0.1:80"), socket(tcp, "[::1]:80", "[::1]:81"), socket(tcp, "[::1]:81", "[::1]:80")},
			[]string{"closed 0 0 [0] [0]", "closed 0 0 [0] [0]", "[::1]:80 [::1]:81 in 4 words", "[::1]:81 [::1]:80 in 4 words"}},
		{"without a state", Place{Connections: true, Closed: true}, []*fdinfo.FileEntry{socket(tcp, "127.0.0.1:80", "127.0.0.1:81"), socket(tcp, "127.0.0.1:81", "127.0.0.1:80")},
			[]string{"closed 0 0 [0] [0]", "closed 0 0 [0] [0]"}},
		{"left as they are", Place{}, []*fdinfo.FileEntry{socket(tcp, "10.0.0.1:5000", "93.184.216.34:443")}, []string{"10.0.0.1:5000 93.184.216.34:443 in 1 words"}},
		{"datagrams from an address that is not here", elsewhere, []*fdinfo.FileEntry{socket(udp, "10.0.0.1:5000", "8.8.8.8:53"), socket(udp, "10.0.0.9:5000", "8.8.8.8:53"), socket(udp, "10.0.0.1:53", ""), socket(udp, "10.0.0.1:54", "10.0.0.1:53")},
			[]string{"0.0.0.0:5000 8.8.8.8:53 in 1 words", "10.0.0.9:5000 8.8.8.8:53 in 1 words", "10.0.0.1:53 0.0.0.0:0 in 1 words", "10.0.0.1:54 10.0.0.1:53 in 1 words"}},
		{"datagrams", moved, []*fdinfo.FileEntry{socket(udp, "10.0.0.1:53", "8.8.8.8:53"), socket(udp, "10.0.0.1:53", "10.0.0.1:54"), socket(udp, "0.0.0.0:53", ""), socket(udp, "239.1.1.1:53", "")},
			[]string{"10.0.0.9:53 8.8.8.8:53 in 1 words", "10.0.0.9:53 10.0.0.9:54 in 1 words", "0.0.0.0:53 0.0.0.0:0 in 1 words", "239.1.1.1:53 0.0.0.0:0 in 1 words"}},
	} {
		for i, got := range edited(t, test.place, test.files...) {
			if got != test.want[i] {
				t.Errorf("%s: socket %d is %s, want %s", test.name, i, got, test.want[i])
			}
		}
	}
}

// The ends of a connection are in one network namespace.
func TestOtherNamespace(t *testing.T) {
	a, b := socket(unix.IPPROTO_TCP, "127.0.0.1:80", "127.0.0.1:5000"), socket(unix.IPPROTO_TCP, "127.0.0.1:5000", "127.0.0.1:80")
	b.Isk.NsId = new(uint32(10))
	for _, got := range edited(t, Place{Connections: true}, a, b) {
		if got != "closed 0 0 [0] [0]" {
			t.Errorf("a connection between namespaces is %s", got)
		}
	}
}

// A raw socket of TCP is no connection, and has no port.
func TestRawSocket(t *testing.T) {
	f := socket(unix.IPPROTO_TCP, "127.0.0.1:6", "127.0.0.1:7")
	f.Isk.Type = new(uint32(unix.SOCK_RAW))
	plan := Make(Place{Connections: true}, []*fdinfo.FileEntry{f})
	plan.Edit(f)
	if text(f) != "127.0.0.1:6 127.0.0.1:7 in 1 words" || len(plan.Closed)+len(plan.ports) > 0 {
		t.Errorf("%s, closed %q, ports %v", text(f), plan.Closed, plan.ports)
	}
}

// CRIU compares the size of a file that did not grow by appending, unless it may have changed, and no mode.
func TestSizes(t *testing.T) {
	for _, test := range []struct {
		name   string
		flags  uint32
		mount  int32
		forget bool
	}{
		{"read", unix.O_RDONLY, 1, false},
		{"read and append", unix.O_RDWR | unix.O_APPEND, 1, true},
		{"write", unix.O_WRONLY, 1, false},
		{"write on a volume that may have changed", unix.O_WRONLY, 2, true},
		{"read on a volume that may have changed", unix.O_RDONLY, 2, true},
	} {
		f := &fdinfo.FileEntry{Reg: &regfile.RegFileEntry{Flags: &test.flags, MntId: &test.mount, Size: new(uint64(7)), Mode: new(uint32(unix.S_IFREG | 0o644))}}
		edited(t, Place{Volumes: map[int32]bool{2: true}}, f)
		if f.GetReg().Mode != nil {
			t.Errorf("%s: the mode is compared", test.name)
		}
		if forgotten := f.GetReg().Size == nil; forgotten != test.forget {
			t.Errorf("%s: the size is forgotten: %v", test.name, forgotten)
		}
	}
}

// An entry of any content is edited without a panic.
func FuzzEdit(f *testing.F) {
	good, err := proto.MarshalOptions{AllowPartial: true}.Marshal(socket(unix.IPPROTO_TCP, "10.0.0.1:80", "10.0.0.1:80"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Fuzz(func(t *testing.T, data []byte) {
		e := new(fdinfo.FileEntry)
		if err := (proto.UnmarshalOptions{AllowPartial: true}).Unmarshal(data, e); err != nil {
			return
		}
		place := Place{Connections: true, Moves: true, Addresses: addresses("10.0.0.9", "fd00::9")}
		Make(place, []*fdinfo.FileEntry{e}).Edit(e)
	})
}

// A timer that repeats goes on if it was not read since its time came. Others are as they were.
func TestTimers(t *testing.T) {
	for _, test := range [][5]uint64{{1, 0, 0, 5, 5}, {0, 0, 0, 5, 0}, {1, 0, 3, 5, 3}, {1, 0, 0, 0, 0}} {
		f := &fdinfo.FileEntry{Tfd: &timerfd.TimerfdEntry{Ticks: &test[0], Vsec: &test[1], Vnsec: &test[2], Isec: new(uint64(0)), Insec: &test[3]}}
		Make(Place{}, nil).Edit(f)
		if got := f.GetTfd().GetVnsec(); got != test[4] {
			t.Errorf("%v: %d", test, got)
		}
	}
}

// A timer with an absolute time has what is left of it.
func TestAbsoluteTimers(t *testing.T) {
	for _, seconds := range []uint64{0, 3} { // it has come, or is to come
		e := &fdinfo.FileEntry{Tfd: &timerfd.TimerfdEntry{SettimeFlags: new(uint32(unix.TFD_TIMER_ABSTIME)), Vsec: &seconds}}
		Make(Place{}, nil).Edit(e)
		if absolute := e.GetTfd().GetSettimeFlags() != 0; absolute != (seconds == 0) || e.GetTfd().GetVsec() != seconds {
			t.Errorf("%d: %v", seconds, e)
		}
	}
}

// A process without the kernel's code comes back without its data. Others keep both.
func TestWithoutVDSO(t *testing.T) {
	for _, test := range [][3]uint32{{1, mapVVAR, 1}, {mapVDSO, mapVVAR, 2}, {1, 1, 2}} {
		m := &mm.MmEntry{Vmas: []*vma.VmaEntry{{Status: &test[0]}, {Status: &test[1]}}}
		if Make(Place{}, nil).Edit(m); len(m.Vmas) != int(test[2]) {
			t.Errorf("%v: %v", test, m.Vmas)
		}
	}
}

// Sockets that need no address of this machine are named, by the addresses that they get.
func TestFree(t *testing.T) {
	p := Make(Place{}, nil)
	for _, family := range []uint32{unix.AF_INET, unix.AF_INET6} {
		for _, free := range []bool{true, false} {
			f := socket(unix.IPPROTO_TCP, "192.0.2.7:80", "")
			f.Isk.Family, f.Isk.IpOpts = &family, &skinet.IpOptsEntry{Freebind: &free}
			p.Edit(f)
		}
	}
	if p.Free != " 192.0.2.7:80" {
		t.Errorf("%q", p.Free)
	}
}

// A socket that is bound to a group of one link gets the link, and no other one.
func TestLinkGroup(t *testing.T) {
	for at, want := range map[string]string{"[ff02::fb]:5353": "eth0", "[ff01::1]:5353": "eth0", "[ff05::1]:5353": "", "[fd00::1]:5353": ""} {
		f := socket(unix.IPPROTO_UDP, at, "")
		f.Isk.Opts = &skopts.SkOptsEntry{SoBoundDev: new("eth0")}
		if Make(Place{}, nil).Edit(f); f.Isk.GetIfname() != want {
			t.Errorf("%s: %q", at, f.Isk.GetIfname())
		}
	}
}

// A packet socket gets the number that its interface has here, and so does what it has joined there.
func TestInterface(t *testing.T) {
	for name, test := range map[string]struct {
		here map[string]int
		want uint32
	}{
		"another number": {map[string]int{"lo": 1, "other": 2, "eth0": 3}, 3},
		"gone":           {map[string]int{"lo": 1, "other": 2}, math.MaxInt32},
		"not asked for":  {nil, 2},
	} {
		k := &packetsock.PacketSockEntry{Ifindex: new(uint32(2)), Opts: &skopts.SkOptsEntry{SoBoundDev: new("eth0")},
			Mclist: []*packetsock.PacketMclist{{Index: new(uint32(2))}, {Index: new(uint32(1))}}}
		Make(Place{Interfaces: test.here}, nil).Edit(&fdinfo.FileEntry{Psk: k})
		if k.GetIfindex() != test.want || k.Mclist[0].GetIndex() != test.want || k.Mclist[1].GetIndex() != 1 || k.Opts.SoBoundDev != nil {
			t.Errorf("%s: %v", name, k)
		}
	}
}

// Unix sockets that listen come before all that wait for them. What is in order, or no more than names a peer, stays.
func TestWaitingClients(t *testing.T) {
	const waits, listens = unix.BPF_TCP_ESTABLISHED, unix.BPF_TCP_LISTEN
	entry := func(number, peer, state uint32) *fdinfo.FileEntry {
		return &fdinfo.FileEntry{Id: new(number), Usk: &skunix.UnixSkEntry{Ino: new(number), Peer: new(peer), State: new(state)}}
	}
	for name, c := range map[string]struct {
		files []*fdinfo.FileEntry
		want  []uint32
	}{
		"in order":             {[]*fdinfo.FileEntry{entry(1, 0, listens), entry(2, 1, waits), entry(3, 1, waits)}, []uint32{1, 2, 3}},
		"several clients":      {[]*fdinfo.FileEntry{entry(1, 4, waits), entry(2, 4, waits), entry(3, 0, waits), entry(4, 0, listens), entry(5, 4, waits)}, []uint32{4, 2, 3, 1, 5}},
		"two servers, crossed": {[]*fdinfo.FileEntry{entry(1, 3, waits), entry(2, 4, waits), entry(3, 0, listens), entry(4, 0, listens)}, []uint32{3, 4, 1, 2}},
		"two servers, nested":  {[]*fdinfo.FileEntry{entry(1, 4, waits), entry(2, 3, waits), entry(3, 0, listens), entry(4, 0, listens)}, []uint32{4, 3, 2, 1}},
		"accepted":             {[]*fdinfo.FileEntry{entry(1, 2, waits), entry(2, 1, waits), entry(3, 0, listens)}, []uint32{1, 2, 3}},
		"twice the server":     {[]*fdinfo.FileEntry{entry(1, 2, waits), entry(2, 0, listens), {Id: new(uint32(3)), Usk: entry(2, 0, listens).Usk}}, []uint32{2, 1, 3}},
	} {
		p := Make(Place{}, c.files)
		var got []uint32
		for _, f := range c.files {
			f = proto.CloneOf(f) // as read anew
			p.Edit(f)
			got = append(got, f.GetId())
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}
