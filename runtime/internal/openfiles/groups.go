// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Options of multicast groups (linux/in.h), which golang.org/x/sys lacks in part, and the sizes of their
// structures: group_req, and group_filter without sources.
const (
	joinGroup    = 42
	groupFilter  = 48
	groupBytes   = 8 + 128
	filterBytes  = groupBytes + 8
	exceptSource = 0
)

// group is a multicast group on an interface.
type group struct {
	device string
	at     netip.Addr
}

// String is a word, GROUP%DEVICE.
func (g group) String() string { return g.at.String() + "%" + g.device }

func parseGroup(word string) (g group, ok bool) {
	address, device, ok := strings.Cut(word, "%")
	at, err := netip.ParseAddr(address)
	return group{device, at}, ok && err == nil && at.IsMulticast() && device != ""
}

// network are the groups that somebody has joined in a network namespace, with the indices of their
// interfaces.
type network struct {
	joined  map[group]int
	indices map[string]int
}

// networks are those of processes, by their links in /proc. Each is read once.
type networks struct {
	of   map[string]*network
	left int // questions whether a socket is in a group
}

// mostQuestions take a second or so. A program may have a hundred thousand sockets, and as many groups.
const mostQuestions = 1 << 21

func newNetworks() *networks { return &networks{make(map[string]*network), mostQuestions} }

func (all *networks) network(pid int) (*network, error) {
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return nil, err
	}
	n := all.of[link]
	if n == nil {
		if n, err = readNetwork(pid); err != nil {
			return nil, err
		}
		all.of[link] = n
	}
	return n, nil
}

func readNetwork(pid int) (*network, error) {
	n := &network{make(map[group]int), make(map[string]int)}
	text, err := proc.Text(fmt.Sprintf("/proc/%d/net/igmp", pid))
	if err != nil {
		return nil, err
	}
	device, index := "", 0
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		switch b, err := decode(words, 0, 4); {
		case err == nil && strings.HasPrefix(line, "\t"):
			slices.Reverse(b) // as a word of this machine
			n.joined[group{device, netip.AddrFrom4([4]byte(b))}] = index
		case len(words) > 1 && !strings.HasPrefix(line, "\t"):
			device = words[1]
			index, _ = strconv.Atoi(words[0])
			n.indices[device] = index
		}
	}
	text, err = proc.Text(fmt.Sprintf("/proc/%d/net/igmp6", pid))
	if os.IsNotExist(err) { // without IPv6
		return n, nil
	}
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if b, err := decode(words, 2, 16); err == nil {
			index, _ = strconv.Atoi(words[0])
			n.joined[group{words[1], netip.AddrFrom16([16]byte(b))}] = index
			n.indices[words[1]] = index
		}
	}
	return n, nil
}

func decode(words []string, at, bytes int) ([]byte, error) {
	if len(words) <= at {
		return nil, strconv.ErrSyntax
	}
	b, err := hex.DecodeString(words[at])
	if err == nil && len(b) != bytes {
		err = strconv.ErrSyntax
	}
	return b, err
}

// request makes of zeros a group_req of the kernel's, and returns the level of the option that takes it.
func (g group) request(index int, value []byte) (level int) {
	binary.NativeEndian.PutUint32(value, uint32(index))
	if g.at.Is4() {
		binary.NativeEndian.PutUint16(value[8:], unix.AF_INET)
		copy(value[12:], g.at.AsSlice())
		return unix.IPPROTO_IP
	}
	binary.NativeEndian.PutUint16(value[8:], unix.AF_INET6)
	copy(value[16:], g.at.AsSlice())
	return unix.IPPROTO_IPV6
}

// memberships returns those of a network's groups that a socket has joined, but for those that it gets from
// some senders alone.
func (all *networks) memberships(fd int, n *network) (groups []group, err error) {
	if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind == unix.SOCK_STREAM || n == nil {
		return nil, nil //nolint:nilerr // a socket that has no type is in no group
	}
	for g, index := range n.joined {
		if all.left--; all.left < 0 {
			return nil, fmt.Errorf("its sockets may be in too many multicast groups, %d in its network: leave some, or close sockets, before a checkpoint: %w", len(n.joined), errdefs.ErrFailedPrecondition)
		}
		if g.has(fd, index) {
			groups = append(groups, g)
		}
	}
	return groups, nil
}

// has reports whether a socket is in a group.
func (g group) has(fd, index int) bool {
	var value [filterBytes]byte
	filter, err := getsockopt(fd, g.request(index, value[:]), groupFilter, value[:])
	return err == nil && len(filter) == filterBytes && binary.NativeEndian.Uint32(filter[groupBytes:]) == exceptSource
}

// join has a socket join the groups that it has not.
func (s socket) join(pid, fd int, all *networks, set func(option, []byte) error) (failed []error) {
	if len(s.groups) == 0 {
		return nil
	}
	n, err := all.network(pid)
	if err != nil {
		return []error{err}
	}
	for _, g := range s.groups {
		index := n.indices[g.device]
		if g.has(fd, index) {
			continue
		}
		var value [groupBytes]byte
		if err := set(option{g.request(index, value[:]), joinGroup}, value[:]); err != nil {
			failed = append(failed, fmt.Errorf("socket %d of process %s is not in the multicast group %s: %w", s.fd, proc.Describe(pid), g, err))
		}
		if len(failed) == maxErrors {
			break
		}
	}
	return failed
}

// nameInterfaces notes the names of the interfaces that packet sockets listen on, where those of SO_BINDTODEVICE are: CRIU
// notes their numbers, which are others elsewhere. init is the container's first process.
func nameInterfaces(dumped *image.Set, init int) error {
	numbered := func(f *fdinfo.FileEntry) bool {
		return f.GetPsk().GetIfindex() != 0 && f.GetPsk().GetOpts() != nil && f.GetPsk().GetOpts().SoBoundDev == nil
	}
	some := false
	err := image.EachOf(dumped, "files.img", func(f *fdinfo.FileEntry) error {
		some = some || numbered(f)
		return nil
	})
	if err != nil || !some {
		return err
	}
	numbers, err := host.Interfaces(fmt.Sprintf("/proc/%d/ns/net", init))
	if err != nil {
		return err
	}
	return image.EditOf(dumped, "files.img", func(f *fdinfo.FileEntry) error {
		for name, number := range numbers {
			if numbered(f) && uint32(number) == f.GetPsk().GetIfindex() { //nolint:gosec // the kernel's
				f.GetPsk().GetOpts().SoBoundDev = new(name)
			}
		}
		return nil
	})
}
