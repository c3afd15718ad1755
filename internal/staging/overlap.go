// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// writeBehind writes an area's memory to a disk while the driver still fills it, from the begin to
// the end as far as anybody has seen. What is well behind the driver is written, and its digest is
// kept. The copy that follows the driver's end digests everything, and writes again each block
// whose digest has changed. So the copy is right even if the driver went back.
type writeBehind struct {
	b       *File
	path    string
	touched func() (uint64, error) // bytes of the area that the driver has touched
	stopped atomic.Bool
	done    chan struct{} // closed at the end; written is then set

	// written are the digests of the blocks that are in the file, "" of others; nil without a file.
	written []string
}

const (
	// behindDistance is kept from the driver, which may be filling more than one place at a time.
	behindDistance = 2 * images.BlockBytes
	// behindLook is the time between two looks at where it is: 30 MB for it.
	behindLook = 5 * time.Millisecond
)

// StartWriteBehind begins to write to a new file what the driver has touched of the area, in bytes.
func (b *File) StartWriteBehind(path string, touched func() (uint64, error)) {
	c := &writeBehind{b: b, path: path, touched: touched, done: make(chan struct{})}
	b.behind = c
	go func() {
		defer close(c.done)
		// What fails here, on a full disk for example, fails again in the copy, which reports it.
		_ = c.run()
	}()
}

// StopWriteBehind stops writing and returns the digests of written blocks; nil without a file.
func (b *File) StopWriteBehind() []string { return b.behind.end() }

func (c *writeBehind) run() error {
	to, err := openDirect(c.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	defer to.Close()
	end := c.b.Offset + c.b.Length
	c.written = make([]string, (c.b.Length+images.BlockBytes-1)/images.BlockBytes)
	if err := to.Truncate(int64(end)); err != nil {
		return err
	}
	mem, unmap, err := mapAligned(c.b.Handle, end, unix.PROT_READ)
	if err != nil {
		return err
	}
	defer unmap()
	ready := make(chan int)
	var workers sync.WaitGroup
	var failed atomic.Bool
	for range runtime.NumCPU() {
		workers.Go(func() {
			for n := range ready {
				from := c.b.Offset + uint64(n)*images.BlockBytes
				block := mem[from:min(from+images.BlockBytes, end)]
				digest := images.DigestBlock(block)
				switch whole, err := writeBlock(to, block, from, &c.stopped); {
				case err != nil:
					failed.Store(true)
				case whole:
					c.written[n] = digest
				}
			}
		})
	}
	for next := 0; next < len(c.written) && !failed.Load() && !c.stopped.Load(); {
		at, err := c.touched()
		if err != nil {
			break
		}
		if uint64(next+1)*images.BlockBytes+behindDistance > at {
			time.Sleep(behindLook)
			continue
		}
		ready <- next
		next++
	}
	close(ready)
	workers.Wait()
	return nil
}

// writeBlock writes a block but for its zeros. whole is false if stop, which may be nil, is set.
func writeBlock(to *os.File, block []byte, at uint64, stop *atomic.Bool) (whole bool, err error) {
	for len(block) > 0 {
		if stop != nil && stop.Load() {
			return false, nil
		}
		part := block[:min(ioBytes, len(block))]
		if !zero(part) {
			if _, err := to.WriteAt(part, int64(at)); err != nil {
				return false, err
			}
		}
		block, at = block[len(part):], at+uint64(len(part))
	}
	return true, nil
}

func (c *writeBehind) end() []string {
	if c == nil {
		return nil
	}
	c.stopped.Store(true)
	<-c.done
	return c.written
}

func (c *writeBehind) remove() {
	// A zero copy has no file.
	if c.end() != nil {
		_ = os.Remove(c.path)
	}
}
