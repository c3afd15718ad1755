// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Of the kernel's interface that lists and ends sockets: include/uapi/linux/sock_diag.h, inet_diag.h.
const (
	sockDiagByFamily = 20
	sockDestroy      = 21
	diagRequest      = 56 // bytes of struct inet_diag_req_v2: 8, then the socket's identity; unix_diag_req is smaller
	diagIdentity     = 48 // bytes of struct inet_diag_sockid, which a message has from byte 4 on
	diagMessage      = 72 // bytes of struct inet_diag_msg, the last 4 of them the inode
	// ended are the states in which a connection waits for stray packets: TIME_WAIT and FIN_WAIT2.
	ended = 1<<6 | 1<<5
	// closing are those in which an end waits for the other one's last answer: FIN_WAIT1, LAST_ACK and CLOSING.
	closing   = 1<<4 | 1<<9 | 1<<11
	listening = 1 << 10
	md5Keys   = 18 // INET_DIAG_MD5SIG
)

// lostFIN is how long a connection within the host may take to end. Of two ends that close at once the kernel may
// lose a FIN, on one of some two thousand connections, and sends it again after 200 ms, then after 400 ms.
const lostFIN = 700 * time.Millisecond

// Listeners calls do with the TCP sockets of a family that listen in a network namespace: by their inodes, with how
// many connections wait in each, and whether it has keys (TCP_MD5SIG).
func Listeners(namespace string, family byte, do func(inode, waiting uint32, keys bool)) error {
	return askSockets(namespace, func(s Netlink) error {
		request := tcp(family, listening, nil)
		request[2] = 1 << 1 // INET_DIAG_INFO, without which the kernel names no keys
		return s.Ask(NetlinkMessage(sockDiagByFamily, unix.NLM_F_DUMP, request), func(m []byte) {
			if len(m) < diagMessage {
				return
			}
			keys := false
			for kind := range NetlinkAttributes(m, diagMessage) {
				keys = keys || kind == md5Keys
			}
			do(binary.NativeEndian.Uint32(m[diagMessage-4:]), binary.NativeEndian.Uint32(m[diagMessage-16:]), keys)
		})
	})
}

// FreePorts ends the TCP connections at some local ports of a network namespace (see Addresses) that no
// program has any more. The kernel keeps them for a minute, and a port with them, which a socket
// without SO_REUSEADDR cannot be bound to meanwhile. So it ends their other ends, if they were here: they would
// answer what is restored as if it had ended. Those between two programs here that still end it waits for: a kernel
// before 6.11 that is to end them may keep them for ever (tcp_abort). One whose other end is still open may stay, and
// on an error others too.
func FreePorts(namespace string, ports map[uint16]bool) error {
	return askSockets(namespace, func(s Netlink) error {
		until := time.Now().Add(lostFIN)
		for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
			found, wait, err := endedAt(s, family, ports)
			for err == nil && wait && time.Now().Before(until) {
				time.Sleep(10 * time.Millisecond)
				found, wait, err = endedAt(s, family, ports)
			}
			for _, identity := range found {
				if err == nil {
					err = s.Ask(NetlinkMessage(sockDestroy, unix.NLM_F_ACK, tcp(family, ended, identity)), func([]byte) {})
				}
				if errors.Is(err, unix.ENOENT) {
					err = nil // it has gone
				}
			}
			if err != nil {
				return fmt.Errorf("end connections that no program has any more: %w", err)
			}
		}
		return nil
	})
}

// askSockets asks the kernel about the sockets of a network namespace.
func askSockets(namespace string, do func(s Netlink) error) error {
	return InNetwork(namespace, func() error {
		s, err := OpenNetlink(unix.NETLINK_SOCK_DIAG, 0)
		if err != nil {
			return err
		}
		defer s.Close()
		return do(s)
	})
}

// tcp returns a request about TCP sockets in some states.
func tcp(family byte, states uint32, identity []byte) []byte {
	request := make([]byte, diagRequest)
	request[0], request[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(request[4:], states)
	copy(request[8:], identity)
	return request
}

// endedAt returns the identities of the connections of a family that FreePorts ends, and whether it waits for others.
func endedAt(s Netlink, family byte, ports map[uint16]bool) (found [][]byte, wait bool, err error) {
	err = s.Ask(NetlinkMessage(sockDiagByFamily, unix.NLM_F_DUMP, tcp(family, ended|closing, nil)), func(m []byte) {
		if len(m) < diagMessage || binary.NativeEndian.Uint32(m[diagMessage-4:]) != 0 { // a program has it
			return
		}
		from, to := m[8:24], m[24:40]
		here := bytes.Equal(from, to) || family == unix.AF_INET && from[0] == 127 && to[0] == 127
		near, far := ports[binary.BigEndian.Uint16(m[4:])], ports[binary.BigEndian.Uint16(m[6:])]
		switch {
		case 1<<m[1]&closing != 0:
			wait = wait || here && (near || far)
		case near || here && far:
			found = append(found, m[4:4+diagIdentity])
		}
	})
	return found, wait, err
}
