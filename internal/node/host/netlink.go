// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Netlink is a socket by which the kernel is asked of the thread's network namespace.
type Netlink int

// OpenNetlink opens a socket of a protocol, which waits so long for an answer; 0 is for ever.
func OpenNetlink(protocol int, within time.Duration) (Netlink, error) {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return -1, fmt.Errorf("ask the kernel of its network: %w", err)
	}
	wait := unix.NsecToTimeval(within.Nanoseconds())
	if err := unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		unix.Close(s)
		return -1, err
	}
	return Netlink(s), nil
}

// Close closes the socket.
func (s Netlink) Close() { unix.Close(int(s)) }

// NetlinkMessage returns a message. The body must be of whole words.
func NetlinkMessage(kind, flags uint16, body []byte) []byte {
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|flags)
	m = append(m, make([]byte, 8)...) // the number and the port
	return append(m, body...)
}

// Ask sends messages, and calls each with the bodies that the kernel answers, until it says that this was all.
func (s Netlink) Ask(messages []byte, each func(answer []byte)) error {
	if err := unix.Sendto(int(s), messages, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	for {
		buffer := make([]byte, 1<<16)
		n, _, err := unix.Recvfrom(int(s), buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		answers, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return err
		}
		for _, a := range answers {
			switch {
			case a.Header.Type == unix.NLMSG_DONE:
				return nil
			case a.Header.Type != unix.NLMSG_ERROR:
				each(a.Data)
			case len(a.Data) >= 4 && binary.NativeEndian.Uint32(a.Data) != 0:
				return unix.Errno(-int32(binary.NativeEndian.Uint32(a.Data)))
			default:
				return nil
			}
		}
	}
}

// NetlinkAttributes goes through the attributes that a message has from a place on: their types and values.
func NetlinkAttributes(message []byte, from int) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for rest := message[min(from, len(message)):]; len(rest) >= unix.SizeofNlAttr; {
			size := int(binary.NativeEndian.Uint16(rest))
			if size < unix.SizeofNlAttr || size > len(rest) || !yield(binary.NativeEndian.Uint16(rest[2:]), rest[unix.SizeofNlAttr:size]) {
				return
			}
			rest = rest[min((size+3)&^3, len(rest)):]
		}
	}
}
