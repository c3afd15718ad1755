// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"fmt"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
)

// ErrHalfMade reports a dump in the middle of a connection: CRIU has taken one end of it, and would
// miss the other one in a restore. A moment later the connection is made, or gone.
var ErrHalfMade = errors.New("a connection between processes was just being made")

// checkPeers returns ErrHalfMade if a Unix socket is connected to one that the images do not have.
//
// CRIU 4.2 dumps the end of a connection that nobody has accepted yet with the listening socket as its
// peer (sk-unix.c, dump_one_unix_fd), and does not look whether that one is dumped as well. Its restore
// fails then: "FATAL: Peer unresolved". PyTorch's DataLoader, which hands over each batch by a new
// connection, met it once in 44 checkpoints.
func (im *Images) checkPeers() error {
	if !im.Has("files.img") {
		return nil
	}
	peers, there := make(map[uint32]uint32), make(map[uint32]bool)
	err := each(im, "files.img", func(f *fdinfo.FileEntry) error {
		if s := f.GetUsk(); s != nil {
			there[s.GetIno()] = true
			if s.GetPeer() != 0 && s.GetUflags() == 0 { // else CRIU or a plugin makes the other end
				peers[s.GetIno()] = s.GetPeer()
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for socket, peer := range peers {
		if !there[peer] {
			return fmt.Errorf("%w: the peer %d of Unix socket %d is not in the dump: try again", ErrHalfMade, peer, socket)
		}
	}
	return nil
}
