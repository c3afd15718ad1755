// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/fault"
	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// ioBytes is the unit of reading and writing, a multiple of what O_DIRECT wants on any disk.
const ioBytes = 4 << 20

type block struct {
	file, number int
	from, to     uint64 // in the file
}

// FileRange is a part of a file that is digested or copied.
type FileRange struct {
	Path   string `json:"path"`
	Offset uint64 `json:"offset"`
	Bytes  uint64 `json:"bytes"`
	// To is the file that a copy makes, with the same offsets.
	To string `json:"to,omitempty"`
	// Written is what the write-behind knows of an area's blocks. For a copy, To exists
	// already, with the blocks in it that are known.
	Written []Known `json:"written,omitempty"`
	// Computed are the digests of the blocks if the GPU that had them has computed them. Those of the first and of the last
	// are computed again, and must be the same.
	Computed []string `json:"computed,omitempty"`
	// Disk says that this file is on a disk: a digest flushes it first, and reads it
	// past the page cache.
	Disk bool `json:"disk,omitempty"`
	// Punch has a digest make holes of zeros: of whole blocks, and on a disk of huge pages.
	Punch bool `json:"punch,omitempty"`
}

// digestAll digests the files' blocks on all cores, at most diskReaders if a file is on a disk.
func digestAll(files []FileRange) ([][]string, error) {
	memory := make([][]byte, len(files))
	disk := make([]*os.File, len(files))
	workers := runtime.NumCPU()
	for i, r := range files {
		if r.Disk {
			f, err := openDirect(r.Path, os.O_RDWR)
			if err != nil {
				return nil, err
			}
			defer f.Close()
			if err := LongEnough(f, r.Offset+r.Bytes); err != nil {
				return nil, err
			}
			disk[i], workers = f, min(workers, diskReaders)
			continue
		}
		mem, unmap, err := mapSource(r)
		if err != nil {
			return nil, err
		}
		defer unmap()
		memory[i] = mem
	}
	if err := syncAll(disk); err != nil {
		return nil, err
	}
	digests, err := eachBlock(files, workers, func(b block) (string, error) {
		r := files[b.file]
		if r.Disk {
			return digestBlockOf(disk[b.file], b, r.Punch)
		}
		digest, _, err := r.digest(b.number, memory[b.file][b.from:b.to])
		if err != nil {
			return "", err
		}
		if !r.Punch || digest != images.ZeroBlockDigest {
			return digest, nil
		}
		// The block must not be touched by way of a mapping from now on, which would fill the hole.
		f, err := os.OpenFile(r.Path, os.O_RDWR, 0)
		if err != nil {
			return "", err
		}
		defer f.Close()
		return digest, punch(f, b.from, b.to)
	})
	if err != nil {
		return nil, err
	}
	return digests, syncAll(disk) // the holes
}

// digest returns the digest of a block, and whether it is as it was written.
func (r *FileRange) digest(number int, content []byte) (digest string, same bool, err error) {
	if number >= len(r.Computed) {
		digest, same = knownOf(r.Written, number).of(content)
		return digest, same, nil
	}
	digest = r.Computed[number]
	if number == 0 || number == len(r.Computed)-1 {
		if got := images.DigestBlock(content); got != digest {
			return "", false, fmt.Errorf("block %d of %s has the digest %s, and on its GPU it had %s: the copy is wrong", number, r.Path, got, digest)
		}
	}
	return digest, false, nil
}

func punch(f *os.File, from, to uint64) error {
	err := uninterrupted(func() error {
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(from), int64(to-from))
	})
	if err != nil {
		return fmt.Errorf("make a hole in %s: %w", f.Name(), err)
	}
	return nil
}

// mapSource maps a file that is read. On a disk that would be slow.
func mapSource(r FileRange) (mem []byte, unmap func(), err error) {
	f, err := os.Open(r.Path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	// Reading a mapping beyond its file's end is a fatal signal.
	if err := LongEnough(f, r.Offset+r.Bytes); err != nil {
		return nil, nil, err
	}
	if mem, unmap, err = mmapfile.File(f, r.Offset+r.Bytes, unix.PROT_READ); err != nil {
		return nil, nil, fmt.Errorf("map %s: %w", r.Path, err)
	}
	return mem, unmap, nil
}

// LongEnough refuses a file that is not a plain file, or that ends too early.
func LongEnough(f *os.File, size uint64) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() || uint64(st.Size()) < size {
		return fmt.Errorf("%s is truncated: it has %d bytes of %d", f.Name(), st.Size(), size)
	}
	return nil
}

// copyAll copies the files' ranges, which are memory, and digests them in the same pass. It does
// not write a block again that is written already and unchanged.
func copyAll(files []FileRange) ([][]string, error) {
	sources := make([][]byte, len(files))
	memory := make([][]byte, len(files)) // of a To that is memory too
	to := make([]*os.File, len(files))
	for i, r := range files {
		mem, unmap, err := mapSource(r)
		if err != nil {
			return nil, err
		}
		defer unmap()
		sources[i] = mem
		flags := os.O_RDWR | os.O_CREATE | os.O_EXCL
		if r.Written != nil {
			flags = os.O_RDWR
		}
		// Past the page cache, which GPU state is too large for, where the file system can.
		if to[i], err = openDirect(r.To, flags); err != nil {
			return nil, err
		}
		defer to[i].Close()
		if err := to[i].Truncate(int64(r.Offset + r.Bytes)); err != nil {
			return nil, fmt.Errorf("size %s: %w", r.To, err)
		}
		if memory[i], unmap, err = mapMemory(to[i], r.Offset+r.Bytes); err != nil {
			return nil, err
		}
		defer unmap()
	}
	digests, err := eachBlock(files, runtime.NumCPU(), func(b block) (string, error) {
		content := sources[b.file][b.from:b.to]
		digest, same, err := files[b.file].digest(b.number, content)
		if same || err != nil {
			return digest, err
		}
		if knownOf(files[b.file].Written, b.number).Mark != "" {
			// Blocks that are zero now may have been written with something else.
			if err := punch(to[b.file], b.from, b.to); err != nil {
				return "", err
			}
		}
		if mem := memory[b.file]; mem != nil {
			err = fillBlock(mem, content, b.from)
		} else {
			_, err = writeBlock(to[b.file], content, b.from, nil)
		}
		if err != nil {
			return "", fmt.Errorf("write %s at %d: %w", files[b.file].To, b.from, err)
		}
		return digest, nil
	})
	if err != nil {
		return nil, err
	}
	return digests, syncAll(to)
}

// mapMemory maps a file on a tmpfs; nil for any other. Writes to one file of a tmpfs wait for each
// other, and take small pages; the threads of a mapping do not wait, and take huge ones.
func mapMemory(f *os.File, size uint64) (mem []byte, unmap func(), err error) {
	if !mmapfile.InMemory(f) {
		return nil, func() {}, nil
	}
	if mem, unmap, err = mmapfile.File(f, size, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return nil, nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // without huge pages, small ones
	return mem, unmap, nil
}

// fillBlock is writeBlock for a file that is mapped: zeros stay holes.
func fillBlock(mem, block []byte, at uint64) error {
	if err := fault.At(fault.Point{Operation: "command", Step: "write", Moment: fault.Move}); err != nil {
		return err
	}
	for len(block) > 0 {
		part := block[:min(HugePage-at%HugePage, uint64(len(block)))]
		if !zero(part) {
			// A page that there is no room for would be a fatal signal.
			if err := mmapfile.Populate(mem[at&^(PageSize-1) : at+uint64(len(part))]); err != nil {
				return err
			}
			copy(mem[at:], part)
		}
		block, at = block[len(part):], at+uint64(len(part))
	}
	return nil
}

// openDirect opens a file for O_DIRECT, or without where that is not to be had.
func openDirect(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_DIRECT, 0o600)
	if errors.Is(err, unix.EINVAL) {
		// The refusal comes after the file was made.
		f, err = os.OpenFile(path, flags&^os.O_EXCL, 0o600)
	}
	return f, err
}

// zero reports whether a buffer that is not empty holds only zeros: it equals itself one byte on.
func zero(b []byte) bool {
	return b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
}

// eachBlock calls do for every block of every file, and returns the results by file and block.
func eachBlock(files []FileRange, workers int, do func(block) (string, error)) ([][]string, error) {
	var blocks []block
	out := make([][]string, len(files))
	for i, r := range files {
		for at := r.Offset; at < r.Offset+r.Bytes; at += images.BlockBytes {
			blocks = append(blocks, block{file: i, number: len(out[i]), from: at, to: min(at+images.BlockBytes, r.Offset+r.Bytes)})
			out[i] = append(out[i], "")
		}
	}
	return out, inThreads(workers, uint64(len(blocks)), 1, func(i, _ uint64) error {
		s, err := do(blocks[i])
		out[blocks[i].file][blocks[i].number] = s
		return err
	})
}

// diskReaders bounds how many blocks of disks are read at once, by way of 2 MiB of memory each.
const diskReaders = 8

func syncAll(files []*os.File) error {
	for _, f := range files {
		if f == nil {
			continue
		}
		if err := f.Sync(); err != nil {
			return fmt.Errorf("flush %s: %w", f.Name(), err)
		}
	}
	return nil
}

// digestBlockOf reads a block by parts that end where huge pages do, and makes holes of zeros.
func digestBlockOf(f *os.File, b block, holes bool) (string, error) {
	// Memory from mmap is aligned as O_DIRECT wants it.
	buf, err := unix.Mmap(-1, 0, HugePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return "", fmt.Errorf("get memory to read with: %w", err)
	}
	defer func() { _ = unix.Munmap(buf) }()
	h := images.NewBlockHash()
	for at := b.from; at < b.to; {
		to := min(at&^(HugePage-1)+HugePage, b.to)
		part := buf[:to-at]
		if _, err := f.ReadAt(part, int64(at)); err != nil {
			return "", fmt.Errorf("read %s at %d: %w", f.Name(), at, err)
		}
		h.Write(part)
		if holes && len(part) == HugePage && zero(part) {
			if err := punch(f, at, to); err != nil {
				return "", err
			}
		}
		at = to
	}
	// Where there is no O_DIRECT, the block was read by way of the page cache.
	_ = unix.Fadvise(int(f.Fd()), int64(b.from), int64(b.to-b.from), unix.FADV_DONTNEED)
	return h.Digest(), nil
}
