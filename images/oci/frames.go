// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"io"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/semaphore"
)

// Layers are frames of zstd, one behind the other (RFC 8878, 3), which several processors can make: zstd takes ten
// times as long as to read and hash.
const (
	// frameBytes is what a frame holds at most: the window of the fastest level, so that little is lost.
	frameBytes = 4 << 20
	// mostFrames are on their way at once, of a layer. With more SHA-256 takes longer.
	mostFrames = 8
)

// framer compresses into frames.
type framer struct {
	w       io.Writer
	encoder *zstd.Encoder
	idle    *semaphore.Weighted // processors
	block   []byte              // of the next frame
	made    []chan []byte       // the frames on their way, in order
}

func (f *framer) Write(p []byte) (n int, err error) {
	for n < len(p) {
		if len(f.block) == frameBytes {
			if err := f.begin(); err != nil {
				return n, err
			}
		}
		part := p[n:min(len(p), n+frameBytes-len(f.block))]
		f.block = append(f.block, part...)
		n += len(part)
	}
	return n, nil
}

// begin has the block compressed by an idle processor, once there are few enough frames on their way. Where none is
// idle this one does it, and writes what there is.
func (f *framer) begin() error {
	if err := f.drain(mostFrames - 1); err != nil {
		return err
	}
	block, made := f.block, make(chan []byte, 1)
	f.made, f.block = append(f.made, made), make([]byte, 0, frameBytes)
	if f.idle.TryAcquire(1) {
		go func() {
			defer f.idle.Release(1)
			made <- f.encoder.EncodeAll(block, nil)
		}()
		return nil
	}
	made <- f.encoder.EncodeAll(block, nil)
	return f.drain(0)
}

// drain writes the first frames on their way, until there are so many.
func (f *framer) drain(most int) error {
	for len(f.made) > most {
		frame := <-f.made[0]
		f.made = f.made[1:]
		if _, err := f.w.Write(frame); err != nil {
			return err
		}
	}
	return nil
}

// Close writes the rest.
func (f *framer) Close() error {
	if err := f.begin(); err != nil {
		return err
	}
	return f.drain(0)
}
