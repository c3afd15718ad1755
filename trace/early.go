// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// earlyCopy writes an area's memory to a disk while the driver still fills it.
// The driver goes from the begin to the end, as far as anybody has seen: what is
// well behind it is written, and remembered by the digest of what was there. The
// copy that follows the driver's end digests all, and writes again what is not
// as it was. So it does not matter for the copy whether the driver went back.
type earlyCopy struct {
	b       *backing
	path    string
	touched func() (uint64, error) // bytes of the area that the driver has touched
	stopped atomic.Bool
	done    chan struct{} // closed at the end; written is then set

	// written are the digests of the blocks that are in the file, "" of those that
	// are not; nil when there is no file.
	written []string
}

const (
	// earlyBehind is the distance kept from the driver, which may be filling
	// more than one place at a time.
	earlyBehind = 2 * images.BlockBytes
	// earlyLook is the time between two looks at where it is: 30 MB for it.
	earlyLook = 5 * time.Millisecond
)

// copyEarly begins an early copy to a new file.
func copyEarly(b *backing, path string, touched func() (uint64, error)) *earlyCopy {
	c := &earlyCopy{b: b, path: path, touched: touched, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		// What goes wrong here, a full disk, say, goes wrong again in the copy
		// that follows, and is told there.
		_ = c.run()
	}()
	return c
}

func (c *earlyCopy) run() error {
	to, err := openDirect(c.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	defer to.Close()
	end := c.b.offset + c.b.length
	c.written = make([]string, (c.b.length+images.BlockBytes-1)/images.BlockBytes)
	if err := to.Truncate(int64(end)); err != nil {
		return err
	}
	mem, unmap, err := mapAligned(c.b.file, end, unix.PROT_READ)
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
				from := c.b.offset + uint64(n)*images.BlockBytes
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
		if uint64(next+1)*images.BlockBytes+earlyBehind > at {
			time.Sleep(earlyLook)
			continue
		}
		ready <- next
		next++
	}
	close(ready)
	workers.Wait()
	return nil
}

// writeBlock writes a block, but for what is zero in it, which stays a hole. It
// gives false when it was stopped on the way; stop may be nil.
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

// end stops the copy and gives what is written.
func (c *earlyCopy) end() []string {
	if c == nil {
		return nil
	}
	c.stopped.Store(true)
	<-c.done
	return c.written
}

// remove stops the copy and removes its file.
func (c *earlyCopy) remove() {
	// A zero copy has no file.
	if c.end() != nil {
		_ = os.Remove(c.path)
	}
}
