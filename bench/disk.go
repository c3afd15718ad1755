// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// probePiece is one write of the probe, probeThreads how many go at once.
	probePiece   = 4 << 20
	probeThreads = 8
)

// inMemory says whether a directory's files are memory.
func inMemory(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && (st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC)
}

// diskRates writes that many bytes into a file in dir, past the page cache and
// in parallel, reads them again, and gives both rates in bytes a second; the
// flush at the end of writing is included. The file is removed.
func diskRates(dir string, bytes uint64) (write, read float64, err error) {
	path := filepath.Join(dir, "probe")
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_DIRECT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return 0, 0, fmt.Errorf("measure the disk: open %s past the page cache: %w", path, err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd), os.Remove(path)) }()
	pieces := max(1, int64(bytes/probePiece))
	rate := func(io func(fd int, data []byte, at int64) (int, error)) (float64, error) {
		began := time.Now()
		if err := inPieces(fd, pieces, io); err != nil {
			return 0, fmt.Errorf("measure the disk: %w", err)
		}
		return float64(pieces*probePiece) / time.Since(began).Seconds(), nil
	}
	if write, err = rate(unix.Pwrite); err != nil {
		return 0, 0, err
	}
	read, err = rate(unix.Pread)
	return write, read, err
}

// inPieces reads or writes a file's pieces, several at once, and flushes it.
func inPieces(fd int, pieces int64, io func(fd int, data []byte, at int64) (int, error)) error {
	var next atomic.Int64
	var workers sync.WaitGroup
	failed := make(chan error, probeThreads)
	for range probeThreads {
		workers.Go(func() {
			// Memory from mmap is aligned as O_DIRECT wants it.
			data, err := unix.Mmap(-1, 0, probePiece, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				failed <- err
				return
			}
			defer func() { _ = unix.Munmap(data) }()
			for i := range data {
				data[i] = byte(i * 2654435761 >> 16) // not zeros, which a disk may leave out
			}
			for i := next.Add(1) - 1; i < pieces; i = next.Add(1) - 1 {
				if n, err := io(fd, data, i*probePiece); err != nil || n != probePiece {
					failed <- fmt.Errorf("%d of %d bytes moved: %w", n, probePiece, err)
					return
				}
			}
		})
	}
	workers.Wait()
	select {
	case err := <-failed:
		return err
	default:
		return unix.Fsync(fd)
	}
}

// syncDir waits until all of dir's file system is on the disk, then drops the
// files below dir from the page cache, so that what reads them next reads the
// disk.
func syncDir(dir string) (time.Duration, error) {
	began := time.Now()
	d, err := os.Open(dir)
	if err != nil {
		return 0, fmt.Errorf("flush the images: %w", err)
	}
	defer d.Close()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return 0, fmt.Errorf("flush the images: %w", err)
	}
	took := time.Since(began)
	return took, walkFiles(dir, func(path string, _ *unix.Stat_t) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	})
}

// imageBytes is the space that the files below dir take, holes left out.
func imageBytes(dir string) (bytes uint64, err error) {
	err = walkFiles(dir, func(_ string, st *unix.Stat_t) error {
		bytes += uint64(st.Blocks) * 512
		return nil
	})
	return bytes, err
}

// walkFiles calls do for the files below dir. What is removed meanwhile does not count: containerd
// removes snapshots behind its answer.
func walkFiles(dir string, do func(path string, st *unix.Stat_t) error) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			var st unix.Stat_t
			if err = unix.Stat(path, &st); err != nil {
				err = fmt.Errorf("look at %s: %w", path, err)
			} else {
				err = do(path, &st)
			}
		}
		if path != dir && errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}
