// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import "io"

// The sample of a layer by which worthwhile decides.
const (
	samples     = 16
	sampleBytes = 64 << 10
	// leastSaved is the share of the sample that zstd must save. Below that it takes time for nothing,
	// here and on each node that unpacks the layer.
	leastSaved = 0.05
)

// worthwhile reports whether zstd, at its fastest, makes less of files, and not of such as random
// numbers. It looks at samples that are spread evenly, so it goes by the content alone.
func (b *builder) worthwhile(files []entry) (bool, error) {
	total := uint64(0)
	for _, f := range files {
		total += f.len
	}
	sample := make([]byte, 0, samples*sampleBytes)
	step := max(total/samples, sampleBytes) // of less than that, all
	for from := uint64(0); from < total; from += step {
		at := from
		for _, f := range files {
			if at >= f.len {
				at -= f.len
				continue
			}
			n := len(sample)
			sample = append(sample, make([]byte, min(sampleBytes, f.len-at))...)
			if _, err := f.from.ReadAt(sample[n:], int64(f.offset+at)); err != nil {
				return false, err
			}
			break
		}
	}
	packed := b.encoder.EncodeAll(sample, nil)
	return float64(len(packed)) <= (1-leastSaved)*float64(len(sample)), nil
}

// rawWriter writes a frame of zstd whose blocks are what is written to it, as it is (RFC 8878,
// 3.1.1.2, Raw_Block): every decoder copies them. A layer of them has the media type of one that is
// compressed, so a tool that compresses what is not leaves the layer, and its digest, as they are.
type rawWriter struct {
	w     io.Writer
	begun bool
	block []byte // its header, and what there is of it
}

const (
	rawBlockHeader = 3
	rawBlock       = 128 << 10 // what RFC 8878 allows at most
)

// rawFrame begins a frame: the magic number; a header without size, checksum and dictionary; a
// window of 2^(10+7) bytes, which bounds a block, too.
const rawFrame = "\x28\xb5\x2f\xfd\x00\x38"

func newRawWriter(w io.Writer) *rawWriter {
	return &rawWriter{w: w, block: make([]byte, rawBlockHeader, rawBlockHeader+rawBlock)}
}

func (r *rawWriter) Write(p []byte) (n int, err error) {
	for n < len(p) {
		if len(r.block) == cap(r.block) {
			if err := r.end(0); err != nil {
				return n, err
			}
		}
		part := p[n:min(len(p), n+cap(r.block)-len(r.block))]
		r.block = append(r.block, part...)
		n += len(part)
	}
	return n, nil
}

// end writes the block that there is. last is 1 for the frame's last, else 0.
func (r *rawWriter) end(last int) error {
	if !r.begun {
		if _, err := io.WriteString(r.w, rawFrame); err != nil {
			return err
		}
		r.begun = true
	}
	header := (len(r.block)-rawBlockHeader)<<3 | last // in between are two bits of the block's type, 0
	r.block[0], r.block[1], r.block[2] = byte(header), byte(header>>8), byte(header>>16)
	_, err := r.w.Write(r.block)
	r.block = r.block[:rawBlockHeader]
	return err
}

// Close ends the frame.
func (r *rawWriter) Close() error { return r.end(1) }
