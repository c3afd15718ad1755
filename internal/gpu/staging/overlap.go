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
	"github.com/gpuckpt/gpuckpt/internal/node/fault"
	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// Known is what the write-behind knows of a block.
type Known struct {
	// Mark is the block's images.MarkBlock when it was digested, "" if it was not. As
	// long as the block has the same, it has the same Digest.
	Mark string `json:"mark"`
	// Digest is its images.DigestBlock.
	Digest string `json:"digest"`
}

// know returns what is known of a block from now on; nothing if it is stopped on the way.
func know(block []byte, stop *atomic.Bool) Known {
	const part = 256 << 10 // stays in the processor's cache for the second look
	mark, digest := images.NewBlockMark(), images.NewBlockHash()
	for len(block) > 0 {
		if stop.Load() {
			return Known{}
		}
		n := min(part, len(block))
		mark.Write(block[:n])
		digest.Write(block[:n])
		block = block[n:]
	}
	return Known{mark.Digest(), digest.Digest()}
}

// of returns the block's digest now, and whether it is as it was known.
func (k Known) of(block []byte) (digest string, same bool) {
	if k.Mark != "" && k.Mark == images.MarkBlock(block) {
		return k.Digest, true
	}
	return images.DigestBlock(block), false
}

// knownOf returns what is known of a block by its number.
func knownOf(all []Known, number int) Known {
	if number < len(all) {
		return all[number]
	}
	return Known{}
}

// writeBehind digests an area's memory while the driver still fills it, and writes it to a
// disk if it is to go there. The driver goes from the begin to the end, as far as anybody
// has seen. What is well behind the driver is digested and written. What follows the
// driver's end marks everything, which is twice as fast, and digests and writes again
// each block whose mark has changed. So the result is right even if the driver went back.
type writeBehind struct {
	b       *File
	path    string                 // "" to digest alone
	touched func() (uint64, error) // bytes of the area that the driver has touched
	stopped atomic.Bool
	done    chan struct{} // closed at the end; written is then set

	// written is what is known of the blocks that are digested, and in the file if there
	// is one; empty of the others. nil if the file could not be made.
	written []Known
}

const (
	// behindDistance is kept from the driver, which may be filling more than one place at a time.
	behindDistance = 2 * images.BlockBytes
	// behindLook is the time between two looks at where it is: 30 MB for it.
	behindLook = 5 * time.Millisecond
	// leastUrgent is the nice value of threads that yield to all others.
	leastUrgent = 19
)

// StartWriteBehind begins to digest the area, and to write it to a new file unless path is
// "". touched returns how many bytes of the area the driver has touched.
func (b *File) StartWriteBehind(path string, touched func() (uint64, error)) {
	if path == "" && b.Length <= behindDistance {
		return // it would come to nothing
	}
	c := &writeBehind{b: b, path: path, touched: touched, done: make(chan struct{})}
	b.behind = c
	go func() {
		defer close(c.done)
		// What fails here, on a full disk for example, fails again in the copy, which reports it.
		_ = c.run()
	}()
}

// StopWriteBehind stops it, and returns what is known of the blocks that are digested and
// written, empty for the others; nil if there is no file.
func (b *File) StopWriteBehind() []Known { return b.behind.end() }

func (c *writeBehind) run() error {
	end := c.b.Offset + c.b.Length
	var to *os.File
	workers := runtime.NumCPU()
	if c.path != "" {
		var err error
		if to, err = openDirect(c.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL); err != nil {
			return err
		}
		defer to.Close()
	} else {
		// The driver and the filling are at work: a quarter of the processors is theirs. (With a
		// quarter for the digests, 0.1 s of them was left when CRIU was done: 16 GiB, an H200.)
		workers = max(1, workers*3/4)
	}
	c.written = make([]Known, (c.b.Length+images.BlockBytes-1)/images.BlockBytes)
	if to != nil {
		if err := to.Truncate(int64(end)); err != nil {
			return err
		}
	}
	mem, unmap, err := mmapfile.File(c.b.Handle, end, unix.PROT_READ)
	if err != nil {
		return err
	}
	defer unmap()
	ready := make(chan int)
	var group sync.WaitGroup
	var failed atomic.Bool
	for range workers {
		group.Go(func() {
			// What waits for nobody takes no time from the driver. The thread ends with this
			// goroutine.
			runtime.LockOSThread()
			_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), leastUrgent)
			for n := range ready {
				from := c.b.Offset + uint64(n)*images.BlockBytes
				block := mem[from:min(from+images.BlockBytes, end)]
				known := know(block, &c.stopped)
				if to == nil || known.Mark == "" {
					c.written[n] = known
					continue
				}
				switch whole, err := writeBlock(to, block, from, &c.stopped); {
				case err != nil:
					failed.Store(true)
				case whole:
					c.written[n] = known
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
	group.Wait()
	return nil
}

// writeBlock writes a block but for its zeros. whole is false if stop, which may be nil, is set.
func writeBlock(to *os.File, block []byte, at uint64, stop *atomic.Bool) (whole bool, err error) {
	if err := fault.At(fault.Point{Operation: "command", Step: "write", Moment: fault.Move}); err != nil {
		return false, err
	}
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

// end stops the copy and returns what is written.
func (c *writeBehind) end() []Known {
	if c == nil {
		return nil
	}
	c.stopped.Store(true)
	<-c.done
	return c.written
}

func (c *writeBehind) remove() {
	// A zero copy has no file.
	if c.end() != nil && c.path != "" {
		_ = os.Remove(c.path)
	}
}
