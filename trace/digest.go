// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"
)

// BlockBytes is the size of the blocks that are digested, counted from the
// begin of an area; the last may be shorter.
const BlockBytes = 64 << 20

// ioBytes is the unit of reading and writing, a multiple of what O_DIRECT
// wants on any disk.
const ioBytes = 4 << 20

// block is one block of one of several files.
type block struct {
	file, number int
	from, to     uint64 // in the file
}

// digestAll digests the files' blocks on all cores.
func digestAll(files []FileRange) ([][]string, error) {
	sources, done, err := openSources(files)
	defer done()
	if err != nil {
		return nil, err
	}
	return eachBlock(files, func(b block) (string, error) {
		return digest(sources[b.file][b.from:b.to]), nil
	})
}

// digest gives a block's digest as OCI words it. BLAKE3 rather than SHA-256
// because it is two to three times as fast and nothing may wait for it.
func digest(b []byte) string {
	sum := blake3.Sum256(b)
	return "blake3:" + hex.EncodeToString(sum[:])
}

// openSources maps the files that are read. done is to be called in any case.
func openSources(files []FileRange) (sources [][]byte, done func(), err error) {
	var undo []func()
	done = func() {
		for _, f := range undo {
			f()
		}
	}
	for _, r := range files {
		f, err := os.Open(r.Path)
		if err != nil {
			return nil, done, err
		}
		defer f.Close()
		// Reading a mapping beyond its file's end is a fatal signal.
		if err := longEnough(f, r.Offset+r.Bytes); err != nil {
			return nil, done, err
		}
		mem, unmap, err := mapAligned(f, r.Offset+r.Bytes, unix.PROT_READ)
		if err != nil {
			return nil, done, fmt.Errorf("map %s: %w", r.Path, err)
		}
		undo = append(undo, unmap)
		sources = append(sources, mem)
	}
	return sources, done, nil
}

// longEnough refuses a file that ends too early.
func longEnough(f *os.File, size uint64) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() || uint64(st.Size()) < size {
		return fmt.Errorf("%s is truncated: it has %d bytes of %d", f.Name(), st.Size(), size)
	}
	return nil
}

// copyAll copies the files' ranges and digests them in the same pass.
func copyAll(files []FileRange) ([][]string, error) {
	sources, done, err := openSources(files)
	defer done()
	if err != nil {
		return nil, err
	}
	to := make([]*os.File, len(files))
	for i, r := range files {
		// Past the page cache where the file system can: GPU state is larger
		// than what the cache is good for.
		to[i], err = openDirect(r.To, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
		if err != nil {
			return nil, err
		}
		defer to[i].Close()
		if err := to[i].Truncate(int64(r.Offset + r.Bytes)); err != nil {
			return nil, fmt.Errorf("size %s: %w", r.To, err)
		}
	}
	digests, err := eachBlock(files, func(b block) (string, error) {
		source := sources[b.file]
		for at := b.from; at < b.to; at += ioBytes {
			part := source[at:min(at+ioBytes, b.to)]
			if zero(part) {
				continue // it stays a hole
			}
			if _, err := to[b.file].WriteAt(part, int64(at)); err != nil {
				return "", fmt.Errorf("write %s at %d: %w", files[b.file].To, at, err)
			}
		}
		return digest(source[b.from:b.to]), nil
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
		if from[i], err = openDirect(r.Path, os.O_RDONLY); err != nil {
			return nil, nil, kept, err
		}
		defer from[i].Close()
		if err := longEnough(from[i], r.Offset+r.Bytes); err != nil {
			return nil, nil, kept, err
		}
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
	digests, err = eachBlock(files, func(b block) (string, error) {
		mem := to[b.file]
		for at := b.from; at < b.to; at += ioBytes {
			part := mem[at:min(at+ioBytes, b.to)]
			if _, err := io.ReadFull(io.NewSectionReader(from[b.file], int64(at), int64(len(part))), part); err != nil {
				return "", fmt.Errorf("read %s at %d: %w", files[b.file].Path, at, err)
			}
		}
		return digest(mem[b.from:b.to]), nil
	})
	return paths, digests, kept, err
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

// eachBlock calls do for every block of every file on all cores and gives what
// it returned, by file and block.
func eachBlock(files []FileRange, do func(block) (string, error)) ([][]string, error) {
	var blocks []block
	out := make([][]string, len(files))
	for i, r := range files {
		for at := r.Offset; at < r.Offset+r.Bytes; at += BlockBytes {
			blocks = append(blocks, block{file: i, number: len(out[i]), from: at, to: min(at+BlockBytes, r.Offset+r.Bytes)})
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
			for {
				at := int(next.Add(1)) - 1
				if at >= len(blocks) {
					return
				}
				s, err := do(blocks[at])
				if err != nil {
					next.Store(int64(len(blocks)))
					errs <- err
					return
				}
				out[blocks[at].file][blocks[at].number] = s
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
