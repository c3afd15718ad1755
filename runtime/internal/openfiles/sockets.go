// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package openfiles

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/held"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const (
	maxSockets = 100_000  // as in a dump
	maxLine    = 1 << 20  // a socket may be in thousands of groups
	maxText    = 64 << 20 // of all sockets
	maxErrors  = 16
	maxValue   = 40 // of IP_OPTIONS
)

// Options that golang.org/x/sys lacks: of linux/in6.h and of net/udplite.h.
const (
	flowInfo, flowInfoSend        = 11, 33
	sendCoverage, receiveCoverage = 10, 11
)

// option is one of sockets, by its level and its number.
type option struct{ level, number int }

func (o option) compare(to option) int { return cmp.Or(o.level-to.level, o.number-to.number) }

// options are those that can be read and set, by their names for people. What CRIU restores is among
// them, since it does so for some sockets alone: TCP_NODELAY for connections, not for what listens.
var options = map[option]string{
	{unix.SOL_SOCKET, unix.SO_KEEPALIVE}: "SO_KEEPALIVE", {unix.SOL_SOCKET, unix.SO_LINGER}: "SO_LINGER",
	{unix.SOL_SOCKET, unix.SO_OOBINLINE}: "SO_OOBINLINE", {unix.SOL_SOCKET, unix.SO_PRIORITY}: "SO_PRIORITY",
	{unix.SOL_SOCKET, unix.SO_TIMESTAMP}: "SO_TIMESTAMP", {unix.SOL_SOCKET, unix.SO_TIMESTAMPNS}: "SO_TIMESTAMPNS",
	{unix.SOL_SOCKET, unix.SO_TIMESTAMPING}: "SO_TIMESTAMPING", {unix.SOL_SOCKET, unix.SO_BUSY_POLL}: "SO_BUSY_POLL",
	{unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE}: "SO_MAX_PACING_RATE", {unix.SOL_SOCKET, unix.SO_ZEROCOPY}: "SO_ZEROCOPY",
	{unix.SOL_SOCKET, unix.SO_RXQ_OVFL}: "SO_RXQ_OVFL", {unix.SOL_SOCKET, unix.SO_PEEK_OFF}: "SO_PEEK_OFF",
	{unix.SOL_SOCKET, unix.SO_SELECT_ERR_QUEUE}: "SO_SELECT_ERR_QUEUE", {unix.SOL_SOCKET, unix.SO_LOCK_FILTER}: "SO_LOCK_FILTER",
	{unix.SOL_SOCKET, unix.SO_TXREHASH}: "SO_TXREHASH", {unix.IPPROTO_IP, unix.IP_RECVOPTS}: "IP_RECVOPTS", {unix.IPPROTO_IP, unix.IP_RETOPTS}: "IP_RETOPTS",
	{unix.IPPROTO_IP, unix.IP_OPTIONS}: "IP_OPTIONS", {unix.IPPROTO_IP, unix.IP_TOS}: "IP_TOS",
	{unix.IPPROTO_IP, unix.IP_TTL}: "IP_TTL", {unix.IPPROTO_IP, unix.IP_PKTINFO}: "IP_PKTINFO",
	{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER}: "IP_MTU_DISCOVER", {unix.IPPROTO_IP, unix.IP_RECVERR}: "IP_RECVERR",
	{unix.IPPROTO_IP, unix.IP_RECVTTL}: "IP_RECVTTL", {unix.IPPROTO_IP, unix.IP_RECVTOS}: "IP_RECVTOS",
	{unix.IPPROTO_IP, unix.IP_RECVORIGDSTADDR}: "IP_RECVORIGDSTADDR", {unix.IPPROTO_IP, unix.IP_MINTTL}: "IP_MINTTL",
	{unix.IPPROTO_IP, unix.IP_TRANSPARENT}: "IP_TRANSPARENT", {unix.IPPROTO_IP, unix.IP_FREEBIND}: "IP_FREEBIND",
	{unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT}: "IP_BIND_ADDRESS_NO_PORT", {unix.IPPROTO_IP, unix.IP_LOCAL_PORT_RANGE}: "IP_LOCAL_PORT_RANGE",
	{unix.IPPROTO_IP, unix.IP_MULTICAST_IF}: "IP_MULTICAST_IF", {unix.IPPROTO_IP, unix.IP_MULTICAST_TTL}: "IP_MULTICAST_TTL",
	{unix.IPPROTO_IP, unix.IP_MULTICAST_LOOP}: "IP_MULTICAST_LOOP", {unix.IPPROTO_IP, unix.IP_MULTICAST_ALL}: "IP_MULTICAST_ALL",
	{unix.IPPROTO_IP, unix.IP_UNICAST_IF}: "IP_UNICAST_IF", {unix.IPPROTO_IPV6, unix.IPV6_TCLASS}: "IPV6_TCLASS",
	{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS}: "IPV6_UNICAST_HOPS", {unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF}: "IPV6_MULTICAST_IF",
	{unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS}: "IPV6_MULTICAST_HOPS", {unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_LOOP}: "IPV6_MULTICAST_LOOP",
	{unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_ALL}: "IPV6_MULTICAST_ALL", {unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER}: "IPV6_MTU_DISCOVER",
	{unix.IPPROTO_IPV6, unix.IPV6_RECVERR}: "IPV6_RECVERR", {unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO}: "IPV6_RECVPKTINFO",
	{unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT}: "IPV6_RECVHOPLIMIT", {unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS}: "IPV6_RECVTCLASS",
	{unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG}: "IPV6_DONTFRAG", {unix.IPPROTO_IPV6, unix.IPV6_AUTOFLOWLABEL}: "IPV6_AUTOFLOWLABEL",
	{unix.IPPROTO_IPV6, unix.IPV6_ADDR_PREFERENCES}: "IPV6_ADDR_PREFERENCES", {unix.IPPROTO_IPV6, unix.IPV6_MINHOPCOUNT}: "IPV6_MINHOPCOUNT",
	{unix.IPPROTO_TCP, unix.TCP_NODELAY}: "TCP_NODELAY", {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE}: "TCP_KEEPIDLE",
	{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL}: "TCP_KEEPINTVL", {unix.IPPROTO_TCP, unix.TCP_KEEPCNT}: "TCP_KEEPCNT",
	{unix.IPPROTO_TCP, unix.TCP_SYNCNT}: "TCP_SYNCNT", {unix.IPPROTO_TCP, unix.TCP_LINGER2}: "TCP_LINGER2",
	{unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT}: "TCP_DEFER_ACCEPT", {unix.IPPROTO_TCP, unix.TCP_CONGESTION}: "TCP_CONGESTION",
	{unix.IPPROTO_TCP, unix.TCP_THIN_LINEAR_TIMEOUTS}: "TCP_THIN_LINEAR_TIMEOUTS", {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT}: "TCP_USER_TIMEOUT",
	{unix.IPPROTO_TCP, unix.TCP_FASTOPEN}: "TCP_FASTOPEN", {unix.IPPROTO_TCP, unix.TCP_FASTOPEN_CONNECT}: "TCP_FASTOPEN_CONNECT",
	{unix.IPPROTO_TCP, unix.TCP_FASTOPEN_NO_COOKIE}: "TCP_FASTOPEN_NO_COOKIE", {unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT}: "TCP_NOTSENT_LOWAT",
	{unix.IPPROTO_TCP, unix.TCP_SAVE_SYN}: "TCP_SAVE_SYN", {unix.IPPROTO_TCP, unix.TCP_INQ}: "TCP_INQ",
	{unix.IPPROTO_TCP, unix.TCP_MAXSEG}: "TCP_MAXSEG", {unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP}: "TCP_WINDOW_CLAMP",
	{unix.IPPROTO_UDP, unix.UDP_ENCAP}: "UDP_ENCAP", {unix.IPPROTO_UDP, unix.UDP_CORK}: "UDP_CORK", {unix.IPPROTO_UDP, unix.UDP_SEGMENT}: "UDP_SEGMENT",
	{unix.IPPROTO_UDP, unix.UDP_GRO}: "UDP_GRO", {unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_TX}: "UDP_NO_CHECK6_TX", {unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_RX}: "UDP_NO_CHECK6_RX",
	{unix.SOL_SOCKET, unix.SO_PASSPIDFD}: "SO_PASSPIDFD", {unix.SOL_SOCKET, unix.SO_PASSRIGHTS}: "SO_PASSRIGHTS",
	{unix.SOL_SOCKET, unix.SO_DEBUG}: "SO_DEBUG", {unix.SOL_SOCKET, unix.SO_WIFI_STATUS}: "SO_WIFI_STATUS", {unix.SOL_SOCKET, unix.SO_NOFCS}: "SO_NOFCS",
	{unix.SOL_SOCKET, unix.SO_INCOMING_CPU}: "SO_INCOMING_CPU", {unix.SOL_SOCKET, unix.SO_PREFER_BUSY_POLL}: "SO_PREFER_BUSY_POLL",
	{unix.SOL_SOCKET, unix.SO_BUSY_POLL_BUDGET}: "SO_BUSY_POLL_BUDGET", {unix.SOL_SOCKET, unix.SO_TXTIME}: "SO_TXTIME",
	{unix.SOL_SOCKET, unix.SO_RCVMARK}: "SO_RCVMARK", {unix.SOL_SOCKET, unix.SO_RCVPRIORITY}: "SO_RCVPRIORITY",
	{unix.SOL_SOCKET, unix.SO_TIMESTAMP_NEW}: "SO_TIMESTAMP_NEW", {unix.SOL_SOCKET, unix.SO_TIMESTAMPNS_NEW}: "SO_TIMESTAMPNS_NEW",
	{unix.SOL_SOCKET, unix.SO_TIMESTAMPING_NEW}: "SO_TIMESTAMPING_NEW", {unix.IPPROTO_IP, unix.IP_CHECKSUM}: "IP_CHECKSUM",
	{unix.IPPROTO_IP, unix.IP_PASSSEC}: "IP_PASSSEC", {unix.IPPROTO_IP, unix.IP_RECVFRAGSIZE}: "IP_RECVFRAGSIZE",
	{unix.IPPROTO_IP, unix.IP_RECVERR_RFC4884}: "IP_RECVERR_RFC4884", {unix.IPPROTO_IPV6, unix.IPV6_RECVERR_RFC4884}: "IPV6_RECVERR_RFC4884",
	{unix.IPPROTO_IPV6, unix.IPV6_RECVORIGDSTADDR}: "IPV6_RECVORIGDSTADDR", {unix.IPPROTO_IPV6, unix.IPV6_RECVFRAGSIZE}: "IPV6_RECVFRAGSIZE",
	{unix.IPPROTO_IPV6, unix.IPV6_RECVHOPOPTS}: "IPV6_RECVHOPOPTS", {unix.IPPROTO_IPV6, unix.IPV6_RECVRTHDR}: "IPV6_RECVRTHDR",
	{unix.IPPROTO_IPV6, unix.IPV6_RECVDSTOPTS}: "IPV6_RECVDSTOPTS", {unix.IPPROTO_IPV6, unix.IPV6_RECVPATHMTU}: "IPV6_RECVPATHMTU",
	{unix.IPPROTO_IPV6, flowInfo}: "IPV6_FLOWINFO", {unix.IPPROTO_IPV6, flowInfoSend}: "IPV6_FLOWINFO_SEND",
	{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_IF}: "IPV6_UNICAST_IF", {unix.IPPROTO_IPV6, unix.IPV6_ROUTER_ALERT_ISOLATE}: "IPV6_ROUTER_ALERT_ISOLATE",
	{unix.IPPROTO_IPV6, unix.IPV6_HOPOPTS}: "IPV6_HOPOPTS", {unix.IPPROTO_IPV6, unix.IPV6_RTHDR}: "IPV6_RTHDR",
	{unix.IPPROTO_IPV6, unix.IPV6_RTHDRDSTOPTS}: "IPV6_RTHDRDSTOPTS", {unix.IPPROTO_IPV6, unix.IPV6_DSTOPTS}: "IPV6_DSTOPTS",
	{unix.IPPROTO_IPV6, unix.IPV6_2292PKTINFO}:  "IPV6_2292PKTINFO",
	{unix.IPPROTO_IPV6, unix.IPV6_2292HOPLIMIT}: "IPV6_2292HOPLIMIT", {unix.IPPROTO_IPV6, unix.IPV6_2292HOPOPTS}: "IPV6_2292HOPOPTS",
	{unix.IPPROTO_IPV6, unix.IPV6_2292DSTOPTS}: "IPV6_2292DSTOPTS", {unix.IPPROTO_IPV6, unix.IPV6_2292RTHDR}: "IPV6_2292RTHDR",
	{unix.IPPROTO_TCP, unix.TCP_TX_DELAY}: "TCP_TX_DELAY", {unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS}: "TCP_RTO_MAX_MS",
	{unix.IPPROTO_TCP, unix.TCP_RTO_MIN_US}: "TCP_RTO_MIN_US", {unix.IPPROTO_TCP, unix.TCP_DELACK_MAX_US}: "TCP_DELACK_MAX_US",
	{unix.IPPROTO_IPV6, unix.IPV6_CHECKSUM}: "IPV6_CHECKSUM", {unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS}: "PACKET_QDISC_BYPASS",
	{unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING}: "PACKET_IGNORE_OUTGOING",
	{unix.IPPROTO_UDPLITE, sendCoverage}:           "UDPLITE_SEND_CSCOV", {unix.IPPROTO_UDPLITE, receiveCoverage}: "UDPLITE_RECV_CSCOV",
	{unix.SOL_NETLINK, unix.NETLINK_PKTINFO}: "NETLINK_PKTINFO", {unix.SOL_NETLINK, unix.NETLINK_BROADCAST_ERROR}: "NETLINK_BROADCAST_ERROR",
	{unix.SOL_NETLINK, unix.NETLINK_NO_ENOBUFS}: "NETLINK_NO_ENOBUFS", {unix.SOL_NETLINK, unix.NETLINK_LISTEN_ALL_NSID}: "NETLINK_LISTEN_ALL_NSID",
	{unix.SOL_NETLINK, unix.NETLINK_CAP_ACK}: "NETLINK_CAP_ACK", {unix.SOL_NETLINK, unix.NETLINK_EXT_ACK}: "NETLINK_EXT_ACK",
	{unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK}: "NETLINK_GET_STRICT_CHK",
}

// With these a socket may have an address that is not here.
var transparent, freeBind = option{unix.IPPROTO_IP, unix.IP_TRANSPARENT}, option{unix.IPPROTO_IP, unix.IP_FREEBIND}

// ofConnection are options that the kernel sets for a connection itself: a program's is that of another socket.
var ofConnection = map[option]bool{{unix.IPPROTO_TCP, unix.TCP_MAXSEG}: true, {unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP}: true}

// socket is what is noted of one, which one descriptor of it names.
type socket struct {
	pid, fd int // as the container counts
	values  map[option][]byte
	groups  []group
}

// readOptions returns the values that a socket has. Others it cannot have.
func readOptions(fd int) map[option][]byte {
	family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return nil
	}
	protocol, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	kind, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	const closed, listens, unconnected = 7, 10, 536 // the last one is TCP's own size of a segment
	tcp, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	connected := err == nil && tcp.State != listens && (tcp.State != closed || tcp.Snd_mss != unconnected) // or once was
	values := make(map[option][]byte)
	for o, name := range options {
		ip := family == unix.AF_INET || family == unix.AF_INET6
		switch {
		case o.level == unix.IPPROTO_IP && !ip, o.level == unix.SOL_NETLINK && family != unix.AF_NETLINK, o.level == unix.IPPROTO_IPV6 && family != unix.AF_INET6,
			(o.level == unix.IPPROTO_TCP || o.level == unix.IPPROTO_UDP || o.level == unix.IPPROTO_UDPLITE) && (!ip || o.level != protocol),
			kind == unix.SOCK_STREAM && strings.Contains(name, "MULTICAST"), // it can be read, not set
			connected && ofConnection[o]:
			continue
		}
		if value, err := getsockopt(fd, o.level, o.number, make([]byte, maxValue)); err == nil {
			values[o] = value
		}
	}
	return values
}

// fresh are the options of new sockets, by their family, type and protocol.
type fresh map[[3]int]map[option][]byte

// without leaves out of a socket's values zeros that a new one has too, which are most of them.
func (all fresh) without(fd int, values map[option][]byte) map[option][]byte {
	var of [3]int
	for i, o := range []int{unix.SO_DOMAIN, unix.SO_TYPE, unix.SO_PROTOCOL} {
		of[i], _ = unix.GetsockoptInt(fd, unix.SOL_SOCKET, o)
	}
	if _, known := all[of]; !known {
		all[of] = nil
		if s, err := unix.Socket(of[0], of[1]|unix.SOCK_CLOEXEC, of[2]); err == nil {
			all[of] = readOptions(s)
			unix.Close(s)
		}
	}
	maps.DeleteFunc(values, func(o option, value []byte) bool {
		return bytes.Equal(value, all[of][o]) && len(bytes.Trim(value, "\x00")) == 0
	})
	return values
}

// getsockopt reads an option into a buffer, whose content the kernel may heed.
func getsockopt(fd, level, number int, value []byte) ([]byte, error) {
	n := uint32(len(value))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(number),
		uintptr(unsafe.Pointer(&value[0])), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return nil, errno
	}
	return value[:min(int(n), len(value))], nil
}

// Save notes what CRIU has left out of a dump, whose processes still stand still; init is the container's
// first one.
func Save(dir string, dumped *image.Set, init int, pids func() ([]int, error)) error {
	inside, err := proc.Inside(pids, init)
	if err != nil {
		return err
	}
	if err := cmp.Or(saveRoot(dir, init), nameInterfaces(dumped, init)); err != nil {
		return err
	}
	file := filepath.Join(dir, image.SocketsName)
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	text, left := bufio.NewWriter(f), maxText // a container may have a hundred thousand sockets
	seen, networks, usual := make(map[uint64]bool), newNetworks(), make(fresh)
	elsewhere := make(map[uint32]bool) // may have an address that is not here; by their inodes
	for number, pid := range inside {
		n, err := networks.network(pid)
		if err != nil && !proc.Ended(err) {
			return err
		}
		var failed error
		err = proc.EachSocket(pid, func(fd, s, _ int) bool {
			var st unix.Stat_t
			if failed == nil && unix.Fstat(s, &st) == nil && !seen[st.Ino] && len(seen) < maxSockets {
				seen[st.Ino] = true
				noted := socket{pid: number, fd: fd, values: usual.without(s, readOptions(s))}
				if noted.values[transparent] != nil && noted.values[freeBind] == nil {
					elsewhere[uint32(st.Ino)], noted.values[freeBind] = true, make([]byte, 4) //nolint:gosec // CRIU's are so
				}
				noted.groups, failed = networks.memberships(s, n)
				var line bytes.Buffer
				write(&line, noted)
				if left -= line.Len(); failed == nil && (line.Len() > maxLine || left < 0) {
					failed = fmt.Errorf("its sockets are in too many multicast groups: leave some before a checkpoint: %w", errdefs.ErrFailedPrecondition)
				}
				_, _ = text.Write(line.Bytes()) // Flush says it
			}
			return false
		})
		if failed != nil {
			return fmt.Errorf("process %s: %w", proc.Describe(pid), failed)
		}
		if err != nil && !proc.Ended(err) {
			return err
		}
	}
	if len(seen) == 0 {
		return os.Remove(file)
	}
	return cmp.Or(bindFreely(dumped, elsewhere), text.Flush(), f.Close())
}

// bindFreely has CRIU bind transparent sockets to addresses that are not here, as it does with those of IP_FREEBIND: it
// knows nothing of IP_TRANSPARENT. Restore sets both options as they were.
func bindFreely(dumped *image.Set, sockets map[uint32]bool) error {
	if len(sockets) == 0 {
		return nil
	}
	return image.EditOf(dumped, "files.img", func(f *fdinfo.FileEntry) error {
		if s := f.GetIsk(); sockets[s.GetIno()] && s.GetFamily() == unix.AF_INET {
			if s.IpOpts == nil {
				s.IpOpts = new(skinet.IpOptsEntry)
			}
			s.IpOpts.Freebind = new(true)
		}
		return nil
	})
}

// write writes a line: the process, the descriptor, and the values as LEVEL.NUMBER=HEX, then the groups.
func write(w io.Writer, s socket) {
	fmt.Fprintf(w, "%d %d", s.pid, s.fd)
	for o, value := range s.values {
		fmt.Fprintf(w, " %d.%d=%x", o.level, o.number, value)
	}
	for _, g := range s.groups {
		fmt.Fprintf(w, " %s", g)
	}
	fmt.Fprintln(w)
}

// Sockets are what a dump has noted: lines, which take a tenth of the memory of what they say.
type Sockets []string

// Read reads the file of a dump, if there is one.
func Read(dumped *image.Set) (Sockets, error) {
	return image.ReadText(dumped, image.SocketsName, parse)
}

func parse(r io.Reader) (all Sockets, err error) {
	type descriptor struct{ pid, fd int }
	seen, left := make(map[descriptor]bool), maxText
	err = image.Lines(r, image.SocketsName, maxLine, func(line string) bool {
		s, ok := parseSocket(strings.Fields(line))
		of := descriptor{s.pid, s.fd}
		if left -= len(line) + 1; !ok || seen[of] || left < 0 {
			return false
		}
		seen[of] = true
		all = append(all, line)
		return true
	})
	return all, err
}

func parseSocket(words []string) (s socket, ok bool) {
	if len(words) < 2 {
		return s, false
	}
	var err error
	if s.pid, err = strconv.Atoi(words[0]); err == nil {
		s.fd, err = strconv.Atoi(words[1])
	}
	if err != nil || s.fd < 0 {
		return s, false
	}
	s.values = make(map[option][]byte)
	for _, word := range words[2:] {
		name, text, is := strings.Cut(word, "=")
		if !is {
			g, ok := parseGroup(word)
			if !ok {
				return s, false
			}
			s.groups = append(s.groups, g)
			continue
		}
		level, number, _ := strings.Cut(name, ".")
		var o option
		var lerr, nerr error
		o.level, lerr = strconv.Atoi(level)
		o.number, nerr = strconv.Atoi(number)
		value, err := hex.DecodeString(text)
		if lerr != nil || nerr != nil || err != nil || options[o] == "" || len(value) == 0 || len(value) > maxValue {
			return s, false
		}
		s.values[o] = value
	}
	return s, true
}

// Restore has the processes give their sockets what these had. The error names what they do not get
// here, and is no reason to end them. inside are the container's processes, see proc.Inside.
func (all Sockets) Restore(inside map[int]int, gate held.Gate) error {
	var failed []error
	processes, networks := held.At(gate), newNetworks()
	for _, line := range all {
		s, _ := parseSocket(strings.Fields(line))
		if pid, there := inside[s.pid]; there && len(failed) < maxErrors {
			failed = append(failed, s.restore(pid, processes, networks)...)
		}
	}
	return errors.Join(failed[:min(len(failed), maxErrors)]...)
}

func (s socket) restore(pid int, processes *held.Processes, networks *networks) (failed []error) {
	fd, err := proc.CopyOf(pid, s.fd)
	if err != nil {
		return []error{err}
	}
	defer unix.Close(fd)
	set := func(o option, value []byte) error {
		return processes.Lend(pid, value, func(at uint64) error {
			return processes.Call(pid, unix.SYS_SETSOCKOPT, uint64(s.fd), uint64(o.level), uint64(o.number), at, uint64(len(value)))
		})
	}
	now := readOptions(fd)
	// By their numbers: some options set others as well, as those for time stamps do.
	for _, o := range slices.SortedFunc(maps.Keys(s.values), option.compare) {
		value := s.values[o]
		if is, has := now[o]; !has || bytes.Equal(is, value) {
			continue
		}
		if err := set(o, value); err != nil {
			failed = append(failed, fmt.Errorf("socket %d of process %s has not the %s that it had: %w", s.fd, proc.Describe(pid), options[o], err))
		}
	}
	return append(failed, s.join(pid, fd, networks, set)...)
}
