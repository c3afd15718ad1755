// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// TornSocket is a Unix socket of a dump that is connected to one which the dump lacks. CRIU dumps
// it and cannot restore it ("Peer … unresolved for …").
type TornSocket struct {
	// Inode and Peer are the inodes of the socket and of the missing one.
	Inode, Peer uint32
}

// uskCallback marks a socket that a plugin restores (criu/sk-unix.c, USK_CALLBACK).
const uskCallback = 1 << 2

// tornSockets returns the Unix sockets whose other end is in none of the images. They were found in a
// program of PyTorch's DataLoader, in one of some fifty checkpoints: its processes open and close
// connections all the time.
func (im *Images) tornSockets() ([]TornSocket, error) {
	if !im.Has("files.img") {
		return nil, nil
	}
	var connected []TornSocket
	known := make(map[uint32]bool)
	err := image.EachOf(im.Set, "files.img", func(f *fdinfo.FileEntry) error {
		if s := f.GetUsk(); s != nil {
			known[s.GetIno()] = true
			if s.GetPeer() != 0 && s.GetUflags()&uskCallback == 0 {
				connected = append(connected, TornSocket{s.GetIno(), s.GetPeer()})
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var torn []TornSocket
	for _, s := range connected {
		if !known[s.Peer] {
			torn = append(torn, s)
		}
	}
	return torn, nil
}
