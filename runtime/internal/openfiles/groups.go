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

	"golang.org/x/sys/unix"

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

// groupsOf returns the groups that somebody has joined in a process's network, and the interfaces by
// their names.
func groupsOf(pid int) (joined map[group]int, err error) {
	joined = make(map[group]int)
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/igmp", pid))
	if err != nil {
		return nil, err
	}
	device, index := "", 0
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		switch b, err := decode(words, 0, 4); {
		case err == nil && strings.HasPrefix(line, "\t"):
			slices.Reverse(b) // as a word of this machine
			joined[group{device, netip.AddrFrom4([4]byte(b))}] = index
		case len(words) > 1 && !strings.HasPrefix(line, "\t"):
			device = words[1]
			index, _ = strconv.Atoi(words[0])
		}
	}
	text, err = os.ReadFile(fmt.Sprintf("/proc/%d/net/igmp6", pid))
	if os.IsNotExist(err) { // without IPv6
		return joined, nil
	}
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if b, err := decode(words, 2, 16); err == nil {
			index, _ = strconv.Atoi(words[0])
			joined[group{words[1], netip.AddrFrom16([16]byte(b))}] = index
		}
	}
	return joined, nil
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

// request returns a group_req of the kernel's, and the level of the option that takes it.
func (g group) request(index int) (level int, value []byte) {
	value = make([]byte, groupBytes)
	binary.NativeEndian.PutUint32(value, uint32(index))
	if g.at.Is4() {
		binary.NativeEndian.PutUint16(value[8:], unix.AF_INET)
		copy(value[12:], g.at.AsSlice())
		return unix.IPPROTO_IP, value
	}
	binary.NativeEndian.PutUint16(value[8:], unix.AF_INET6)
	copy(value[16:], g.at.AsSlice())
	return unix.IPPROTO_IPV6, value
}

// memberships returns those of the groups that a socket has joined, but for those that it gets from some
// senders alone.
func memberships(fd int, joined map[group]int) (groups []group) {
	for g, index := range joined {
		level, request := g.request(index)
		filter, err := getsockopt(fd, level, groupFilter, append(request, make([]byte, filterBytes-groupBytes)...))
		if err == nil && len(filter) == filterBytes && binary.NativeEndian.Uint32(filter[groupBytes:]) == exceptSource {
			groups = append(groups, g)
		}
	}
	return groups
}

// join has a socket join the groups that it has not.
func (s socket) join(pid, fd int, set func(option, []byte) error) (failed []error) {
	if len(s.groups) == 0 {
		return nil
	}
	joined, err := groupsOf(pid)
	if err != nil {
		return []error{err}
	}
	indices := make(map[string]int)
	for g, index := range joined {
		indices[g.device] = index
	}
	has := memberships(fd, joined)
	for _, g := range s.groups {
		if slices.Contains(has, g) {
			continue
		}
		level, request := g.request(indices[g.device])
		if err := set(option{level, joinGroup}, request); err != nil {
			failed = append(failed, fmt.Errorf("socket %d of process %s is not in the multicast group %s: %w", s.fd, proc.Describe(pid), g, err))
		}
	}
	return failed
}
