// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"fmt"
	"maps"
	"math"
	"slices"
)

// cells are the values of a call's arguments that a filter and a profile can tell apart, one of each
// kind. Each word of an argument is compared with constants, or its bits under one mask are: so the
// kinds are intervals, with and without those bits.
type cells struct {
	words map[int]*cell
}

type cell struct {
	from    map[uint32]bool // where intervals begin
	mask    uint32          // 0 for none
	classes map[uint32]bool // what the bits under the mask are compared with
}

func (c *cells) word(n int) *cell {
	if c.words == nil {
		c.words = make(map[int]*cell)
	}
	if c.words[n] == nil {
		c.words[n] = &cell{from: map[uint32]bool{0: true}, classes: make(map[uint32]bool)}
	}
	return c.words[n]
}

// note adds a comparison by an instruction.
func (c *cells) note(word int, mask uint32, in instruction) error {
	w := c.word(word)
	switch {
	case in.code == common && mask == math.MaxUint32:
		return w.class(in.k, 0)
	case mask == math.MaxUint32:
		w.point(in.k)
		return nil
	case in.code == equal:
		return w.class(mask, in.k)
	}
	return fmt.Errorf("%w (it compares what it has masked)", errNotJudged)
}

// point adds a comparison with a constant: equal, below or above.
func (w *cell) point(k uint32) {
	w.from[k] = true
	if k < math.MaxUint32 {
		w.from[k+1] = true
	}
}

// class adds a comparison of the bits under a mask.
func (w *cell) class(mask, value uint32) error {
	if mask == 0 || value&^mask != 0 {
		return nil // always, or never
	}
	if w.mask != 0 && w.mask != mask {
		return fmt.Errorf("%w (it masks an argument by %#x and %#x)", errNotJudged, w.mask, mask)
	}
	w.mask = mask
	w.classes[value] = true
	return nil
}

// values returns one value of each kind.
func (w *cell) values() []uint32 {
	all := make(map[uint32]bool)
	for a := range w.from {
		all[a] = true
		if w.mask == 0 {
			continue
		}
		for class := range w.classes {
			if x, ok := nextIn(a, w.mask, class); ok {
				all[x] = true
			}
		}
		x := a // the first one from here on that is in no class
		for range w.classes {
			if !w.classes[x&w.mask] {
				break
			}
			if x |= w.mask&-w.mask - 1; x == math.MaxUint32 {
				break
			}
			x++
		}
		all[x] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// nextIn returns the first number from a on whose bits under a mask are so.
func nextIn(a, mask, bits uint32) (first uint32, ok bool) {
	for i := range 33 {
		low := uint32(uint64(1)<<i - 1)
		base := uint64(a)
		if i > 0 {
			base = (uint64(a)>>i + 1) << i // the next one with other upper bits
		}
		if base > math.MaxUint32 {
			continue
		}
		x := uint32(base)&^(mask&low) | bits&low
		if i == 0 {
			x = a
		}
		if x&mask == bits && x >= a && (!ok || x < first) {
			first, ok = x, true
		}
	}
	return first, ok
}

// maxCells bounds the kinds of calls of one number.
const maxCells = 1 << 16

// each calls do with a call of each kind, until it returns an error.
func (c *cells) each(do func(*call) error) error {
	numbers := slices.Sorted(maps.Keys(c.words))
	values := make([][]uint32, len(numbers))
	count := 1
	for i, n := range numbers {
		values[i] = c.words[n].values()
		if count *= len(values[i]); count > maxCells {
			return fmt.Errorf("%w (it compares too much)", errNotJudged)
		}
	}
	var one call
	var fill func(i int) error
	fill = func(i int) error {
		if i == len(numbers) {
			return do(&one)
		}
		for _, v := range values[i] {
			one[numbers[i]] = v
			if err := fill(i + 1); err != nil {
				return err
			}
		}
		return nil
	}
	return fill(0)
}
