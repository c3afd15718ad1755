// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// BlockBytes is the size of the blocks that are digested, counted from the
// begin of an area; the last may be shorter.
const BlockBytes = 64 << 20

// ioBytes is the unit of reading and writing, a multiple of what O_DIRECT
// wants on any disk.
const ioBytes = 4 << 20

// blockJob is one block of one of several files.
type blockJob struct {
	file, block int
	from, bytes uint64 // in the file
}

// digestAll digests the files' blocks on all cores.
func digestAll(files []FileRange) ([][]string, error) {
	open := make([]*os.File, len(files))
	for i, r := range files {
		f, err := os.Open(r.Path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		open[i] = f
	}
	return eachBlock(files, func(j blockJob, buf []byte) (string, error) {
		return digestBlock(open[j.file], nil, j, buf)
	})
}

// copyAll copies the files' ranges and digests them in the same pass.
func copyAll(files []FileRange) (digests [][]string, err error) {
	from, to := make([]*os.File, len(files)), make([]*os.File, len(files))
	for i, r := range files {
		if from[i], err = os.Open(r.Path); err != nil {
			return nil, err
		}
		defer from[i].Close()
		// Past the page cache where the file system can: GPU state is larger
		// than what the cache is good for.
		to[i], err = os.OpenFile(r.To, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_DIRECT, 0o600)
		if errors.Is(err, unix.EINVAL) {
			to[i], err = os.OpenFile(r.To, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		}
		if err != nil {
			return nil, err
		}
		defer to[i].Close()
		if err := to[i].Truncate(int64(r.Offset + r.Bytes)); err != nil {
			return nil, fmt.Errorf("size %s: %w", r.To, err)
		}
	}
	digests, err = eachBlock(files, func(j blockJob, buf []byte) (string, error) {
		return digestBlock(from[j.file], to[j.file], j, buf)
	})
	if err != nil {
		return nil, err
	}
	for _, f := range to {
		if err := f.Sync(); err != nil {
			return nil, fmt.Errorf("flush %s: %w", f.Name(), err)
		}
	}
	return digests, nil
}

// loadAll reads ranges into memory, past the page cache where the file system
// can, and adds that memory to kept.
func loadAll(files []FileRange, kept []*os.File) (paths []string, digests [][]string, _ []*os.File, err error) {
	from, to := make([]*os.File, len(files)), make([][]byte, len(files))
	for i, r := range files {
		from[i], err = os.OpenFile(r.Path, os.O_RDONLY|unix.O_DIRECT, 0)
		if errors.Is(err, unix.EINVAL) {
			from[i], err = os.Open(r.Path)
		}
		if err != nil {
			return nil, nil, kept, err
		}
		defer from[i].Close()
		b, err := newBacking("", r.Offset, r.Bytes)
		if err != nil {
			return nil, nil, kept, err
		}
		kept = append(kept, b.file)
		mem, unmap, err := mapAligned(b.file, r.Offset+r.Bytes, unix.PROT_READ|unix.PROT_WRITE)
		if err != nil {
			return nil, nil, kept, fmt.Errorf("map memory: %w", err)
		}
		defer unmap()
		to[i] = mem
		paths = append(paths, b.path())
	}
	digests, err = eachBlock(files, func(j blockJob, _ []byte) (string, error) {
		sum := sha256.New()
		for done := uint64(0); done < j.bytes; {
			at := j.from + done
			part := to[j.file][at:min(at+ioBytes, j.from+j.bytes)]
			if _, err := io.ReadFull(io.NewSectionReader(from[j.file], int64(at), int64(len(part))), part); err != nil {
				return "", fmt.Errorf("read %s at %d: %w", from[j.file].Name(), at, err)
			}
			sum.Write(part)
			done += uint64(len(part))
		}
		return digestName(sum), nil
	})
	return paths, digests, kept, err
}

// digestName words a digest as OCI does.
func digestName(sum hash.Hash) string { return "sha256:" + hex.EncodeToString(sum.Sum(nil)) }

// digestBlock reads a block, writes it to a file if there is one, and gives its
// digest. A unit of zeros is not written: it stays a hole.
func digestBlock(from, to *os.File, j blockJob, buf []byte) (string, error) {
	sum := sha256.New()
	for done := uint64(0); done < j.bytes; {
		part := buf[:min(uint64(len(buf)), j.bytes-done)]
		at := int64(j.from + done)
		if _, err := io.ReadFull(io.NewSectionReader(from, at, int64(len(part))), part); err != nil {
			return "", fmt.Errorf("read %s at %d: %w", from.Name(), at, err)
		}
		sum.Write(part)
		if to != nil && !zero(part) {
			if _, err := to.WriteAt(part, at); err != nil {
				return "", fmt.Errorf("write %s at %d: %w", to.Name(), at, err)
			}
		}
		done += uint64(len(part))
	}
	return digestName(sum), nil
}

// zero says whether a buffer holds nothing else.
func zero(b []byte) bool {
	for len(b) >= 8 {
		if b[0]|b[1]|b[2]|b[3]|b[4]|b[5]|b[6]|b[7] != 0 {
			return false
		}
		b = b[8:]
	}
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// eachBlock calls do for every block of every file on all cores, with a
// page-aligned buffer, and gives what it returned, by file and block.
func eachBlock(files []FileRange, do func(blockJob, []byte) (string, error)) ([][]string, error) {
	var jobs []blockJob
	out := make([][]string, len(files))
	for i, r := range files {
		for b := uint64(0); b < r.Bytes; b += BlockBytes {
			jobs = append(jobs, blockJob{file: i, block: len(out[i]), from: r.Offset + b, bytes: min(BlockBytes, r.Bytes-b)})
			out[i] = append(out[i], "")
		}
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, runtime.NumCPU())
	for range runtime.NumCPU() {
		wg.Add(1)
		go func() {
			defer wg.Done()
			buf, err := unix.Mmap(-1, 0, ioBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				errs <- err
				return
			}
			defer func() { _ = unix.Munmap(buf) }()
			for {
				at := int(next.Add(1)) - 1
				if at >= len(jobs) {
					return
				}
				j := jobs[at]
				s, err := do(j, buf)
				if err != nil {
					next.Store(int64(len(jobs)))
					errs <- err
					return
				}
				out[j.file][j.block] = s
			}
		}()
	}
	wg.Wait()
	select {
	case err := <-errs:
		return nil, err
	default:
		return out, nil
	}
}
