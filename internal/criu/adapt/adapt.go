// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package adapt changes what CRIU's images say of open files and mounts where the place of a restore is not
// that of the dump.
//
// CRIU has one switch for all TCP connections, open or closed, and one for all files whose size has
// changed: none. The right answer differs from file to file. So a Plan is made of all open files
// of a dump (Make), and then edits the entry of each (Edit), before CRIU reads it:
//
//   - A TCP connection stays open if both of its ends are among the files: gloo, ZMQ, a program's
//     own server, or if its other end was closed here. Its other end would be elsewhere otherwise, and
//     knows nothing of the restore: it becomes a socket without a connection, as CRIU's own switch makes it.
//   - A socket that has the old pod's address gets the new one's. Elsewhere a UDP socket that is connected from an
//     address which is not here, as to a name server, gets the one that leads there.
//   - A socket that is bound to a multicast group of one link is bound to it by the link's name: CRIU notes none.
//   - A packet socket on an interface is on that of the same name, whose number may be another one. The dump's name of it
//     (package openfiles) is gone then: no program has set it.
//   - The socket of NVIDIA's driver gets a name that nobody has taken.
//   - A mount of the host's to which the host's later mounts come, though nobody has asked for that, gets
//     them no longer: CRIU does not see the host's mounts.
//   - A timer that repeats (timerfd) and was not read since its time came goes on: the kernel says that it has
//     no time left, and CRIU would set it so.
//   - A timer with an absolute time (timerfd) gets what is left of it: CRIU adds whole seconds of the clock alone, and
//     has it come too early. One of the day's time is gpuckpt's plugin's (package told).
//   - A Unix socket that waits to be accepted comes after the one that listens: CRIU does not find that else.
//   - A socket whose removed name was below a directory gets the whole path: the directory may be gone.
//   - A process that has unmapped the kernel's code (vDSO) loses that code's data (vvar): CRIU restores both or none.
//   - A file that is open for appending may have grown. Another file on a volume may have changed
//     if the node or the container says so.
//   - A file or directory may have another mode, as a kubelet gives it on a volume (fsGroup): who has it open keeps it.
//
// Nothing else of an entry is changed. The package reads no file and trusts no entry.
package adapt

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	packetsock "github.com/checkpoint-restore/go-criu/v8/crit/images/packet-sock"
	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Place is where a dump is restored.
type Place struct {
	// Connections has the Plan decide which TCP connections stay open. Without it all are left as
	// they are.
	Connections bool
	// Closed reports whether the dump has no state of connections (CRIU's option tcp-close): with
	// Connections none stays open then.
	Closed bool
	// Addresses are those of the network namespace that the processes come into. None: it is made
	// with the container, and nobody knows them yet; there is the loopback interface.
	Addresses []netip.Addr
	// Moves reports whether sockets of an address that is not among Addresses get one that is: in a
	// pod's network, not in the host's.
	Moves bool
	// Shared reports whether other programs may be in the network namespace: it is not made with the
	// container.
	Shared bool
	// Network is the path of a network namespace that is Shared; "" is the host's.
	Network string
	// Interfaces are the numbers of the interfaces there, by their names. None: they are as they were, or not asked for.
	Interfaces map[string]int
	// Slaves are the mounts of the dump, by their number, to which mounts of the host's came unasked.
	Slaves map[uint32]bool
	// Volumes are the mounts of the dump, by their number, on which a file may have changed.
	Volumes map[int32]bool
}

// The kinds of mappings, of CRIU's image.h.
const (
	mapVDSO = 1 << 3
	mapVVAR = 1 << 12
)

// mostFree bounds Free: the kernel takes no variable of more than 128 KiB.
const mostFree = 100_000

// Plan is what is to be changed.
type Plan struct {
	place Place
	ends  map[end]bool        // of connections
	own   map[netip.Addr]bool // addresses that sockets of the dump are bound to
	names map[string]string   // new names of the driver's sockets, by the old ones

	swapped map[uint32]*fdinfo.FileEntry // what stands in the place of an entry, by its number

	// Closed are the connections that come back closed, "127.0.0.1:80 10.0.0.1:1234", of what was edited.
	Closed []string

	// Free are the IPv4 addresses and ports that sockets may be bound to where the address is not there (IP_FREEBIND),
	// " 192.0.2.1:80", of what was edited: CRIU 4.2 binds them before it sets the option.
	Free string

	// ports are those that sockets of TCP come back with, of what was edited.
	ports map[uint16]bool
}

// end is one end of a TCP connection.
type end struct {
	namespace uint32
	from, to  netip.AddrPort
}

// Make returns a plan for all open files of a dump.
func Make(place Place, files []*fdinfo.FileEntry) *Plan {
	p := &Plan{place: place, ends: make(map[end]bool), own: make(map[netip.Addr]bool), names: make(map[string]string), ports: make(map[uint16]bool), swapped: make(map[uint32]*fdinfo.FileEntry)}
	waits := make(map[uint32]*fdinfo.FileEntry) // the first that waits for a socket, by the number of that
	for _, f := range files {
		if u := f.GetUsk(); u.GetPeer() != 0 && waits[u.GetPeer()] == nil {
			waits[u.GetPeer()] = f
		} else if client := waits[u.GetIno()]; client != nil && u.GetState() == unix.BPF_TCP_LISTEN {
			p.swapped[f.GetId()], p.swapped[client.GetId()] = client, f
			delete(waits, u.GetIno()) // an image that says it twice loses no entry
		}
		s := f.GetIsk()
		if s == nil {
			continue
		}
		from, to := source(s), destination(s)
		if isConnection(s) && !place.Closed {
			p.ends[end{s.GetNsId(), from, to}] = true
		}
		if from.Addr().IsValid() && !everywhere(from.Addr()) {
			p.own[from.Addr()] = true
		}
	}
	return p
}

// Edit changes an entry of the dump, if it is of a kind that the plan is about.
func (p *Plan) Edit(entry proto.Message) {
	switch e := entry.(type) {
	case *fdinfo.FileEntry:
		if other := p.swapped[e.GetId()]; other != nil {
			proto.Reset(e)
			proto.Merge(e, other)
		}
		p.file(e)
	case *mnt.MntEntry:
		if p.place.Slaves[e.GetMntId()] {
			e.MasterId = nil
		}
	case *mm.MmEntry:
		has := func(kind uint32) bool {
			return slices.ContainsFunc(e.Vmas, func(v *vma.VmaEntry) bool { return v.GetStatus()&kind != 0 })
		}
		if !has(mapVDSO) {
			e.Vmas = slices.DeleteFunc(e.Vmas, func(v *vma.VmaEntry) bool { return v.GetStatus()&mapVVAR != 0 })
		}
	case *inventory.InventoryEntry:
		if p.place.Connections {
			e.TcpClose = nil // CRIU would insist on its own switch
		}
	}
}

func (p *Plan) file(f *fdinfo.FileEntry) {
	if r := f.GetReg(); r != nil {
		if r.GetFlags()&unix.O_APPEND != 0 || p.place.Volumes[r.GetMntId()] {
			r.Size = nil // CRIU compares no size then
		}
		if r.GetMode()&unix.S_IFMT != unix.S_IFCHR { // CRIU sets a terminal's
			r.Mode = nil
		}
	}
	if t := f.GetTfd(); t.GetTicks() > 0 && t.GetVsec() == 0 && t.GetVnsec() == 0 {
		t.Vsec, t.Vnsec = t.Isec, t.Insec // of one that repeats: 0 would stop it
	}
	if t := f.GetTfd(); t.GetSettimeFlags()&unix.TFD_TIMER_ABSTIME != 0 && (t.GetVsec() != 0 || t.GetVnsec() != 0) {
		t.SettimeFlags = new(t.GetSettimeFlags() &^ unix.TFD_TIMER_ABSTIME)
	}
	if u := f.GetUsk(); u != nil {
		p.name(u)
	}
	if k := f.GetPsk(); k.GetOpts().GetSoBoundDev() != "" {
		p.packet(k)
	}
	s := f.GetIsk()
	switch {
	case s == nil:
	case !isConnection(s):
		outside := s.GetDstPort() != 0 && !p.own[destination(s).Addr()] // else its peer had the old address, which may be a stranger's
		if !p.move(s) && s.GetProto() == unix.IPPROTO_UDP && outside && !s.GetIpOpts().GetFreebind() {
			clear(s.SrcAddr) // the kernel chooses the address when it connects the socket, as it did
		}
		if s.GetFamily() == unix.AF_INET && s.GetIpOpts().GetFreebind() && len(p.Free) < mostFree {
			p.Free += " " + source(s).String()
		}
		if a := source(s).Addr(); s.Ifname == nil && (a.IsLinkLocalMulticast() || a.IsInterfaceLocalMulticast()) {
			s.Ifname = s.GetOpts().SoBoundDev // CRIU notes none, and the kernel needs one
		}
	case p.place.Connections && (!p.inner(s) || !p.move(s)):
		p.Closed = append(p.Closed, fmt.Sprint(source(s), " ", destination(s)))
		s.State, s.SrcPort, s.DstPort = new(uint32(unix.BPF_TCP_CLOSE)), new(uint32), new(uint32)
		s.SrcAddr, s.DstAddr = make([]uint32, len(s.SrcAddr)), make([]uint32, len(s.DstAddr))
	}
	if s.GetType() != unix.SOCK_RAW && s.GetProto() == unix.IPPROTO_TCP && s.GetSrcPort() != 0 {
		p.ports[uint16(s.GetSrcPort())] = true
	}
}

// packet gives a packet socket the number that its interface has here, or one that CRIU finds no interface of.
func (p *Plan) packet(k *packetsock.PacketSockEntry) {
	number, here := p.place.Interfaces[k.GetOpts().GetSoBoundDev()]
	k.Opts.SoBoundDev = nil
	if p.place.Interfaces == nil {
		return
	}
	if !here {
		number = math.MaxInt32
	}
	for _, m := range k.GetMclist() {
		if m.GetIndex() == k.GetIfindex() {
			m.Index = new(uint32(number)) //nolint:gosec // the kernel's
		}
	}
	k.Ifindex = new(uint32(number)) //nolint:gosec // the kernel's
}

// FreePorts ends what is left of the connections of programs that have ended, the checkpointed one
// above all, at the ports of what was edited. CRIU could not bind these ports otherwise. On an error
// some may be taken.
func (p *Plan) FreePorts() error {
	if !p.place.Shared || len(p.ports) == 0 {
		return nil
	}
	return host.FreePorts(p.place.Network, p.ports)
}

// inner reports whether both ends of a connection are in the dump, or the other one was here and is closed:
// what it has sent is still to be read.
func (p *Plan) inner(s *skinet.InetSkEntry) bool {
	from, to := source(s), destination(s)
	if (s.GetState() == unix.BPF_TCP_CLOSE_WAIT || s.GetState() == unix.BPF_TCP_CLOSE) && (from.Addr() == to.Addr() || from.Addr().IsLoopback() && to.Addr().IsLoopback()) {
		from, to = to, from
	}
	return p.ends[end{s.GetNsId(), to, from}]
}

// move gives a socket the addresses that it has here, and reports whether there are such.
func (p *Plan) move(s *skinet.InetSkEntry) bool {
	from, ok := p.here(source(s).Addr())
	if !ok {
		return false
	}
	to := destination(s).Addr()
	if p.own[to] {
		if to, ok = p.here(to); !ok {
			return false
		}
	}
	put(s.SrcAddr, from)
	put(s.DstAddr, to)
	return true
}

// here returns the address that takes the place of one of the dump's, if there is any.
func (p *Plan) here(old netip.Addr) (netip.Addr, bool) {
	if !old.IsValid() || everywhere(old) || slices.Contains(p.place.Addresses, old) {
		return old, true
	}
	if !p.place.Moves {
		return old, false
	}
	var found []netip.Addr
	for _, a := range p.place.Addresses {
		if a.Is4() == old.Is4() && a.IsGlobalUnicast() {
			found = append(found, a)
		}
	}
	if len(found) != 1 {
		return old, false // none, or nobody knows which
	}
	return found[0], true
}

// everywhere reports whether an address means the same in every network.
func everywhere(a netip.Addr) bool { return a.IsLoopback() || a.IsUnspecified() || a.IsMulticast() }

func isConnection(s *skinet.InetSkEntry) bool {
	return s.GetType() != unix.SOCK_RAW && s.GetProto() == unix.IPPROTO_TCP && s.GetDstPort() != 0 && s.GetState() != unix.BPF_TCP_LISTEN
}

func source(s *skinet.InetSkEntry) netip.AddrPort {
	return netip.AddrPortFrom(address(s.SrcAddr), uint16(s.GetSrcPort()))
}

func destination(s *skinet.InetSkEntry) netip.AddrPort {
	return netip.AddrPortFrom(address(s.DstAddr), uint16(s.GetDstPort()))
}

// address returns an address as CRIU has it: its bytes, as words of this machine. An IPv4 address
// in an IPv6 socket is an IPv4 address. It is invalid for another number of words.
func address(words []uint32) netip.Addr {
	b := make([]byte, 0, 16)
	for _, w := range words {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	a, _ := netip.AddrFromSlice(b)
	return a.Unmap()
}

// put is the inverse of address, in the form that the words have.
func put(words []uint32, a netip.Addr) {
	if !a.IsValid() || address(words) == a {
		return
	}
	b := a.AsSlice()
	if len(words) == 4 {
		all := a.As16() // of an IPv4 address the form that an IPv6 socket has
		b = all[:]
	}
	for i := range min(len(words), len(b)/4) {
		words[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
}
