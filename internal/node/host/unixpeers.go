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
	err = askSockets(namespace, func(s Netlink) error {
		request := make([]byte, unixRequest)
		request[0] = unix.AF_UNIX
		binary.NativeEndian.PutUint32(request[4:], ^uint32(0)) // of all states
		binary.NativeEndian.PutUint32(request[12:], showPeer|showPending)
		return s.Ask(NetlinkMessage(sockDiagByFamily, unix.NLM_F_DUMP, request), func(m []byte) {
			for is, others := range NetlinkAttributes(m, unixMessage) {
				self := uint64(binary.NativeEndian.Uint32(m[4:]))
				for ; len(others) >= 4; others = others[4:] {
					switch other := uint64(binary.NativeEndian.Uint32(others)); {
					case other == 0: // it has closed
					case is == unixPeer:
						peers[self] = other
					case is == unixPending:
						peers[other] = self
					}
				}
			}
		})
	})
	return peers, err
}
