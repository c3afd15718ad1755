// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Of include/uapi/linux/unix_diag.h.
const (
	unixRequest = 24 // bytes of struct unix_diag_req
	unixMessage = 16 // bytes of struct unix_diag_msg, the inode from byte 4 on; attributes follow
	showPeer    = 4
	showPending = 8
	unixPeer    = 2 // the attribute with the other end's inode
	unixPending = 3 // that with the inodes of connections that are not accepted
)

// UnixPeers returns the connected Unix sockets of a network namespace (see Addresses) with their other ends,
// by their inodes. The other ends may be of another namespace; that of a connection that is not accepted is
// the socket that listens.
func UnixPeers(namespace string) (peers map[uint64]uint64, err error) {
	peers = make(map[uint64]uint64)
	err = InNetwork(namespace, func() error {
		s, err := openDiag()
		if err != nil {
			return err
		}
		defer unix.Close(s)
		request := make([]byte, unixRequest)
		request[0] = unix.AF_UNIX
		binary.NativeEndian.PutUint32(request[4:], ^uint32(0)) // of all states
		binary.NativeEndian.PutUint32(request[12:], showPeer|showPending)
		return askDiag(s, sockDiagByFamily, unix.NLM_F_DUMP, request, func(m []byte) {
			if len(m) < unixMessage {
				return
			}
			for rest := m[unixMessage:]; len(rest) >= unix.SizeofNlAttr; {
				size, is := int(binary.NativeEndian.Uint16(rest)), binary.NativeEndian.Uint16(rest[2:])
				if size < unix.SizeofNlAttr || size > len(rest) {
					return
				}
				self := uint64(binary.NativeEndian.Uint32(m[4:]))
				for others := rest[unix.SizeofNlAttr:size]; len(others) >= 4; others = others[4:] {
					switch other := uint64(binary.NativeEndian.Uint32(others)); {
					case other == 0: // it has closed
					case is == unixPeer:
						peers[self] = other
					case is == unixPending:
						peers[other] = self
					}
				}
				rest = rest[min((size+3)&^3, len(rest)):]
			}
		})
	})
	return peers, err
}
