// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/binary"
	"errors"
	"fmt"

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
)

// FreePorts ends the TCP connections at some local ports of a network namespace (see Addresses) that no
// program has any more. The kernel keeps them for a minute, and a port with them, which a socket
// without SO_REUSEADDR cannot be bound to meanwhile. One whose other end is still open may stay, and on an
// error others too.
func FreePorts(namespace string, ports map[uint16]bool) error {
	return InNetwork(namespace, func() error {
		s, err := openDiag()
		if err != nil {
			return err
		}
		defer unix.Close(s)
		for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
			found, err := endedAt(s, family, ports)
			for _, identity := range found {
				if err == nil {
					err = askDiag(s, sockDestroy, unix.NLM_F_ACK, tcp(family, identity), nil)
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

func openDiag() (int, error) {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return -1, fmt.Errorf("list connections: %w", err)
	}
	return s, nil
}

// tcp returns a request about TCP connections that have ended.
func tcp(family byte, identity []byte) []byte {
	request := make([]byte, diagRequest)
	request[0], request[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(request[4:], ended)
	copy(request[8:], identity)
	return request
}

// endedAt returns the identities of the connections of a family that FreePorts ends.
func endedAt(s int, family byte, ports map[uint16]bool) (found [][]byte, err error) {
	err = askDiag(s, sockDiagByFamily, unix.NLM_F_DUMP, tcp(family, nil), func(m []byte) {
		if len(m) < diagMessage {
			return
		}
		port, inode := binary.BigEndian.Uint16(m[4:]), binary.NativeEndian.Uint32(m[diagMessage-4:])
		if ports[port] && inode == 0 {
			found = append(found, m[4:4+diagIdentity])
		}
	})
	return found, err
}

// askDiag sends the kernel a request, and calls each with every socket that it answers.
func askDiag(s int, kind, flags uint16, body []byte, each func(message []byte)) error {
	request := make([]byte, unix.SizeofNlMsghdr, unix.SizeofNlMsghdr+len(body))
	binary.NativeEndian.PutUint32(request, uint32(cap(request)))
	binary.NativeEndian.PutUint16(request[4:], kind)
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST|flags)
	request = append(request, body...)
	if err := unix.Sendto(s, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	for {
		answer := make([]byte, 64<<10)
		n, _, err := unix.Recvfrom(s, answer, 0)
		if err != nil {
			return err
		}
		for rest := answer[:n]; len(rest) >= unix.SizeofNlMsghdr; {
			size, is := int(binary.NativeEndian.Uint32(rest)), binary.NativeEndian.Uint16(rest[4:])
			if size < unix.SizeofNlMsghdr || size > len(rest) {
				return unix.EBADMSG
			}
			message := rest[unix.SizeofNlMsghdr:size]
			switch {
			case is == unix.NLMSG_DONE:
				return nil
			case is == unix.NLMSG_ERROR && len(message) >= 4:
				if code := -int32(binary.NativeEndian.Uint32(message)); code != 0 {
					return unix.Errno(code)
				}
				return nil
			case is == sockDiagByFamily && each != nil:
				each(message)
			}
			rest = rest[min((size+3)&^3, len(rest)):]
		}
	}
}
