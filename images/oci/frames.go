// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bufio"
	"bytes"
	"io"
	"slices"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/semaphore"
)

// Layers are frames of zstd, one behind the other (RFC 8878, 3), which several processors can work at: zstd takes ten
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

// unframer decompresses several small frames at once, up to the first one that is large, does not say how much it holds,
// or is damaged. From there on it reads a stream.
type unframer struct {
	from    *bufio.Reader
	decoder *zstd.Decoder
	most    int
	made    []chan unframed // the frames on their way, in order
	plain   []byte          // what is left of the last one
	rest    io.ReadCloser   // the stream behind them; nil as long as there may be another frame
	err     error           // of the last frame, or the stream's begin
}

// unframed is a frame's content.
type unframed struct {
	plain []byte
	err   error
}

func newUnframer(from io.Reader, processors int) (*unframer, error) {
	u := &unframer{from: bufio.NewReaderSize(&lasting{Reader: from}, readBytes), most: min(processors, mostFrames)}
	if u.most == 1 {
		return u, u.stream(nil)
	}
	var err error
	u.decoder, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(u.most), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
	return u, err
}

// stream has all be read as a stream: what was read, and what follows.
func (u *unframer) stream(read []byte) error {
	d, err := zstd.NewReader(io.MultiReader(bytes.NewReader(read), u.from),
		zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
	if err == nil {
		u.rest = d.IOReadCloser()
	}
	return err
}

func (u *unframer) Read(p []byte) (int, error) {
	for len(u.plain) == 0 {
		for u.rest == nil && u.err == nil && len(u.made) < u.most {
			u.begin()
		}
		switch {
		case u.err != nil:
			return 0, u.err
		case len(u.made) > 0:
			f := <-u.made[0]
			u.made, u.plain, u.err = u.made[1:], f.plain, f.err
		default:
			return u.rest.Read(p)
		}
	}
	n := copy(p, u.plain)
	u.plain = u.plain[n:]
	return n, nil
}

// begin has the next frame decompressed, or the rest be read as a stream.
func (u *unframer) begin() {
	frame, holds, small := u.frame()
	if !small {
		u.err = u.stream(frame)
		return
	}
	made := make(chan unframed, 1)
	u.made = append(u.made, made)
	go func() {
		plain, err := u.decoder.DecodeAll(frame, make([]byte, 0, holds))
		made <- unframed{plain, err}
	}()
}

// frame reads a small frame, and returns how many bytes it holds. Of another one it may have read the begin (RFC 8878,
// 3.1.1: a header, blocks with headers of three bytes, and maybe a checksum of four).
func (u *unframer) frame() (frame []byte, holds uint64, small bool) {
	begin, _ := u.from.Peek(zstd.HeaderMaxSize) // the last frame may be shorter
	var h zstd.Header
	if h.Decode(begin) != nil || !h.HasFCS || h.FrameContentSize > frameBytes {
		return nil, 0, false
	}
	take := func(n int) bool {
		at := len(frame)
		frame = slices.Grow(frame, n)[:at+n]
		got, err := io.ReadFull(u.from, frame[at:])
		frame = frame[:at+got]
		return err == nil
	}
	if !take(h.HeaderSize) {
		return frame, 0, false
	}
	for last := false; !last; {
		if len(frame) > 2*frameBytes || !take(3) {
			return frame, 0, false
		}
		header := frame[len(frame)-3:]
		block := int(header[0]) | int(header[1])<<8 | int(header[2])<<16
		size := block >> 3
		if last = block&1 != 0; block>>1&3 == 1 { // RLE_Block: one byte, so often
			size = 1
		}
		if !take(size) {
			return frame, 0, false
		}
	}
	if h.HasCheckSum && !take(4) {
		return frame, 0, false
	}
	return frame, h.FrameContentSize, true
}

// lasting keeps to its first error, which a buffer tells once: a source that is read again may try again for long.
type lasting struct {
	io.Reader
	err error
}

func (l *lasting) Read(p []byte) (n int, err error) {
	if l.err == nil {
		n, l.err = l.Reader.Read(p)
	}
	return n, l.err
}

// Close ends what is under way.
func (u *unframer) Close() (err error) {
	for _, made := range u.made {
		<-made
	}
	u.made = nil
	if u.decoder != nil {
		u.decoder.Close()
	}
	if u.rest != nil {
		err = u.rest.Close()
	}
	return err
}
