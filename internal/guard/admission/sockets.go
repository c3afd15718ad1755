// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	packetsock "github.com/checkpoint-restore/go-criu/v8/crit/images/packet-sock"
	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	sknetlink "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-netlink"
	skopts "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-opts"
	skunix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// messages returns what calls do with each field that is a message, for Range.
func messages(do func(proto.Message)) func(protoreflect.FieldDescriptor, protoreflect.Value) bool {
	return func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if fd.Kind() == protoreflect.MessageKind && !fd.IsList() {
			do(v.Message().Interface())
		}
		return true
	}
}

// words are how many words of four bytes an address has.
var words = map[uint32]int{unix.AF_INET: 1, unix.AF_INET6: 4}

// errRaw refuses a socket that reads what others send.
var errRaw = errors.New("a program has a raw, ping or packet socket open (ping, tcpdump), and the spec does not grant CAP_NET_RAW, by which a program makes one: close it before the checkpoint, or start the container with that capability; for ping the sysctl net.ipv4.ping_group_range is enough, if it has root's group and the container's")

// mayRaw reports whether a program of the container can make sockets that read what others send: CRIU then lends
// it nothing, also in the host's network. Where the container has a user namespace, CRIU makes its sockets in there, and
// the kernel refuses those of a network that is not that namespace's.
func (e *Entries) mayRaw() bool { return e.attainable()&(1<<unix.CAP_NET_RAW) != 0 }

// isRaw reports whether a socket is a raw one, or one of ping's, which are for some groups alone
// (net.ipv4.ping_group_range). The number of what they carry, or of the ping, is where others have a port, and CRIU
// binds them to no port.
func isRaw(s *skinet.InetSkEntry) bool {
	return s.GetType() == unix.SOCK_RAW || s.GetProto() == unix.IPPROTO_ICMP || s.GetProto() == unix.IPPROTO_ICMPV6
}

// raw compares a socket without ports.
func (e *Entries) raw(s *skinet.InetSkEntry) error {
	ping, err := false, error(nil)
	if s.GetType() == unix.SOCK_DGRAM && !e.mayRaw() {
		ping, err = e.mayPing()
	}
	switch {
	case err != nil:
		return err
	case !e.mayRaw() && !ping:
		return errRaw
	case s.GetProto() == unix.IPPROTO_TCP && s.GetDstPort() != 0:
		return errors.New("a program has a raw socket of TCP that is connected to a port, which CRIU takes for a connection: close it before the checkpoint, or have the program connect it to the port 0")
	}
	return e.socketOptions(s.GetOpts())
}

// packet compares a packet socket. CRIU makes it as root, in a network namespace of the dump's (set_netns). Whoever may
// make one may do with it all that the entry says (net/packet/af_packet.c): the kernel asks for no other right for a
// ring, a group that shares packets (fanout), or an interface.
func (e *Entries) packet(s *packetsock.PacketSockEntry) error {
	if !e.mayRaw() {
		return errRaw
	}
	return e.socketOptions(s.GetOpts())
}

// withPorts are the protocols that CRIU restores of sockets with ports.
var withPorts = []uint32{unix.IPPROTO_IP, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE}

// inet compares a socket of the Internet's. CRIU makes and binds it as root.
func (e *Entries) inet(s *skinet.InetSkEntry) error {
	if n := words[s.GetFamily()]; len(s.GetSrcAddr()) != n || len(s.GetDstAddr()) != n {
		return fmt.Errorf("an address of the family %d has %d and %d words", s.GetFamily(), len(s.GetSrcAddr()), len(s.GetDstAddr()))
	}
	port := s.GetSrcPort()
	switch {
	case port > 65535:
		return fmt.Errorf("it has the port %d", port)
	case isRaw(s):
		return e.raw(s)
	case !slices.Contains(withPorts, s.GetProto()):
		return fmt.Errorf("a program has a socket of the protocol %d open, which is not TCP, UDP or UDP-Lite: close it before the checkpoint", s.GetProto())
	}
	if port != 0 && !e.has(unix.CAP_NET_BIND_SERVICE) {
		if first, err := e.firstPort(); err != nil || port < first {
			return cmp.Or(err, fmt.Errorf("it has the port %d, and the spec no CAP_NET_BIND_SERVICE", port))
		}
	}
	return e.socketOptions(s.GetOpts())
}

// firstPort returns the first port that anybody may bind: the spec says it of a network namespace that is made
// for the container, and of another one it is asked.
func (e *Entries) firstPort() (uint32, error) {
	if n, err := strconv.ParseUint(strings.TrimSpace(e.spec.Linux.Sysctl["net.ipv4.ip_unprivileged_port_start"]), 10, 16); err == nil {
		return uint32(n), nil
	}
	namespace, made := e.network()
	if made {
		return 1024, nil // PROT_SOCK of the kernel
	}
	if e.first == nil {
		first, err := e.host.FirstPort(namespace)
		if err != nil {
			return 0, err
		}
		e.first = &first
	}
	return *e.first, nil
}

// mayPing reports whether the container's group may make sockets of ping, and root's, as which CRIU makes them.
func (e *Entries) mayPing() (bool, error) {
	if e.pings == nil {
		first, last := uint32(1), uint32(0) // of a network namespace that is made: none
		namespace, made := e.network()
		if n, _ := fmt.Sscan(e.spec.Linux.Sysctl["net.ipv4.ping_group_range"], &first, &last); n != 2 && !made {
			var err error
			if first, last, err = e.host.PingGroups(namespace); err != nil {
				return false, err
			}
		}
		e.pings = new(first == 0 && e.spec.Process.User.GID <= last)
	}
	return *e.pings, nil
}

// network returns the path of the container's network namespace, "" for the host's, and whether it is made with the
// container.
func (e *Entries) network() (path string, made bool) {
	i := slices.IndexFunc(e.spec.Linux.Namespaces, func(ns specs.LinuxNamespace) bool { return ns.Type == specs.NetworkNamespace })
	if i < 0 {
		return "", false
	}
	path = e.spec.Linux.Namespaces[i].Path
	return path, path == ""
}

// socketOptions compares options that only some may set (net/core/sock.c). Anybody may bind a socket to a
// device, once (Linux 5.7).
func (e *Entries) socketOptions(o *skopts.SkOptsEntry) error {
	admin := e.has(unix.CAP_NET_ADMIN)
	switch {
	case o.GetSoPriority() > 6 && !admin:
		return fmt.Errorf("it has the priority %d, and the spec no CAP_NET_ADMIN", o.GetSoPriority())
	case o.GetSoMark() != 0 && !admin && !e.has(unix.CAP_NET_RAW):
		return fmt.Errorf("it has the mark %d, and the spec no CAP_NET_RAW", o.GetSoMark())
	}
	return nil
}

// Groups of NETLINK_ROUTE that only CAP_NET_ADMIN joins, as bits.
const routingGroups = 1<<(unix.RTNLGRP_IPV4_MROUTE_R-1) | 1<<(unix.RTNLGRP_IPV6_MROUTE_R-1)

// netlinkConnected is the state of a netlink socket that has a destination (NETLINK_CONNECTED).
const netlinkConnected = 1

// netlink compares a netlink socket. CRIU makes and binds it as root. That lets nobody do more: for each
// message the kernel asks for the rights of who sends it, too (netlink_capable). But groups are
// asked for once, when they are joined, and so is a destination.
func (e *Entries) netlink(s *sknetlink.NetlinkSkEntry) error {
	admin := e.has(unix.CAP_NET_ADMIN)
	if len(s.GetGroups()) > 1 {
		return fmt.Errorf("it is in %d words of groups, and CRIU restores one", len(s.GetGroups()))
	}
	for _, groups := range s.GetGroups() {
		free := uint32(0)
		switch s.GetProtocol() {
		case unix.NETLINK_ROUTE:
			free = ^uint32(routingGroups)
		case unix.NETLINK_KOBJECT_UEVENT:
			free = ^uint32(0)
		}
		if groups&^free != 0 && (!admin || s.GetProtocol() == unix.NETLINK_GENERIC && !e.has(unix.CAP_SYS_ADMIN)) {
			return fmt.Errorf("a netlink socket of the protocol %d is in the groups %#x, and the spec has no CAP_NET_ADMIN, or no CAP_SYS_ADMIN", s.GetProtocol(), groups)
		}
	}
	switch group := s.GetDstGroup(); {
	case s.GetState() != netlinkConnected:
	case !admin:
		return errors.New("a netlink socket is connected, and the spec has no CAP_NET_ADMIN: have the program name the receiver with each message")
	case group == 0 || group > 32: // CRIU would take another group
		return fmt.Errorf("a netlink socket is connected to the group %d, which CRIU cannot restore", group)
	}
	return e.socketOptions(s.GetOpts())
}

// longestName is what CRIU takes of an address without the NUL at its end (sk-unix.c, UNIX_PATH_MAX).
const longestName = 107

// unix compares a local socket. CRIU makes its name as root.
func (e *Entries) unix(s *skunix.UnixSkEntry) error {
	if err := e.socketOptions(s.GetOpts()); err != nil {
		return err
	}
	if mode := s.GetFilePerms().GetMode(); mode&^(unix.S_IFSOCK|0o777) != 0 {
		return fmt.Errorf("its name has the mode %#o", mode)
	}
	if s.MntId != nil && s.GetMntId() >= 0 && e.mounts[uint32(s.GetMntId())] == nil {
		return fmt.Errorf("it is on mount %d, which there is not", s.GetMntId())
	}
	if s.NameDir != nil {
		if err := cleanPath(s.GetNameDir()); err != nil {
			return err
		}
	}
	name := strings.TrimSuffix(string(s.GetName()), "\x00")
	if s.GetDeleted() && (name == "" || name[0] == 0) {
		return errors.New("its name is removed, and it has none")
	}
	if name == "" || name[0] == 0 {
		return nil // it has none, or one that is no file
	}
	switch {
	case name == string(s.GetName()):
		return errors.New("its name has no end, and CRIU would read on")
	case len(name) > longestName:
		return fmt.Errorf("a Unix socket has the name %q of %d bytes, and CRIU restores %d: have the program bind a shorter one", name, len(name), longestName)
	case strings.Contains(name, "\x00") || leadsOut(name):
		return fmt.Errorf("a Unix socket has the name %q: have the program bind it by a path without %q", name, "..")
	}
	if strings.HasPrefix(name, "/") != (s.NameDir == nil) { // "//" and "/./" lead where they say
		return fmt.Errorf("its name is %q, below the directory %q", name, s.GetNameDir())
	}
	return nil
}
