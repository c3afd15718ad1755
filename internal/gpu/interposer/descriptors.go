// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// Descriptors of a program's. It can offer any that it has, and be gone by the time that this process closes its own:
// the last close of a file may wait for a server of the program's choice. So the kind of each is looked at first.

// pieces returns GPU memory that the interposer offers: of each the descriptor, which is the caller's, and the size.
// On an error there may be some.
func (c *Interposer) pieces(count uint32) (memory []cuda.Memory, err error) {
	files, err := c.descriptors(count, mayBeMemory)
	sizes := make([]byte, 8*len(files))
	if err == nil {
		err = c.process.access(c.at+offSizes, sizes, false)
	}
	for i, f := range files {
		bytes := binary.LittleEndian.Uint64(sizes[8*i:])
		memory = append(memory, cuda.Memory{File: f, Bytes: bytes})
		if err == nil && (bytes == 0 || bytes%pieceUnit != 0 || bytes > maxPiece) {
			err = fmt.Errorf("the interposer of process %d offers %d bytes as a piece of GPU memory", c.PID, bytes)
		}
	}
	return memory, err
}

// meet has a socket to the interposer, which is the caller's, and returns how many pieces that has taken before.
func (c *Interposer) meet(ctx context.Context) (socket *os.File, taken uint32, err error) {
	now, err := c.ask(ctx, "give back the GPU memory of", askMeet, 0, patience)
	if err != nil {
		return nil, 0, err
	}
	files, err := c.descriptors(1, isLocalSocket)
	if err != nil {
		return nil, 0, err
	}
	return files[0], now.count, nil
}

// descriptors returns duplicates of the descriptors that the interposer offers, which are the caller's: also on an error.
// All satisfy is.
func (c *Interposer) descriptors(count uint32, is func(fd int) bool) (files []*os.File, err error) {
	if count > batch {
		return nil, fmt.Errorf("the interposer of process %d offers %d descriptors", c.PID, count)
	}
	data := make([]byte, 4*count)
	if err := c.process.access(c.at+offDescriptors, data, false); err != nil {
		return nil, err
	}
	for ; len(data) > 0; data = data[4:] {
		number := binary.LittleEndian.Uint32(data)
		fd, err := unix.PidfdGetfd(int(c.process.fd.Fd()), int(number), 0)
		if err != nil {
			return files, fmt.Errorf("take a descriptor of process %d: %w", c.PID, err)
		}
		if !is(fd) {
			go unix.Close(fd) //nolint:errcheck // and wait for it, maybe
			return files, fmt.Errorf("the interposer of process %d offers its descriptor %d, which is of another kind", c.PID, number)
		}
		files = append(files, os.NewFile(uintptr(fd), "GPU memory"))
	}
	return files, nil
}

// mayBeMemory reports whether a descriptor can be one of GPU memory. NVIDIA's driver has devices for it, the software GPU
// files in memory. The driver decides which device it is.
func mayBeMemory(fd int) bool {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return false
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return !slices.Contains([]uint32{unix.S_IFSOCK, unix.S_IFIFO, unix.S_IFDIR, unix.S_IFLNK, unix.S_IFBLK}, st.Mode&unix.S_IFMT)
	}
	var fs unix.Statfs_t
	return unix.Fstatfs(fd, &fs) == nil && fs.Type == unix.TMPFS_MAGIC
}

// isLocalSocket reports whether a descriptor is a Unix socket, whose close waits for nobody.
func isLocalSocket(fd int) bool {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	return err == nil && domain == unix.AF_UNIX
}
