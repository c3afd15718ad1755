// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"strings"
)

// A kernel computes BLAKE3's chaining values of parts of memory, the subtrees of 1024 chunks (BLAKE3 paper, sections
// 2.1 to 2.5). Each block of threads takes a part: its threads compress the chunks, then the parents, level by level,
// in shared memory. The text is for any GPU since Turing, and the driver compiles it.
const (
	digestKernel  = "gpuckpt_digest"
	digestThreads = 256
	// partBytes is a part, in bytes, and resultWords what the kernel says of each, in words of 32 bits: the chaining
	// value and whether all bytes are zeros.
	partBytes   = 1 << 20
	resultWords = 9
	// The last word of a result, which is 0 until the kernel has written the others.
	partHasData, partIsZeros = 1, 2

	chunkOfBlake = 1024
	partsInBlock = 64 // images.BlockBytes
)

var (
	blakeIV      = [8]uint32{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}
	blakePermute = [16]int{2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8}
	// blakeMixes are the columns and diagonals that a round mixes.
	blakeMixes = [8][4]int{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}, {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13}, {3, 4, 9, 14}}
)

// BLAKE3's flags.
const chunkStart, chunkEnd, parent = 1, 2, 4

// ptx writes a kernel's instructions.
type ptx struct{ strings.Builder }

func (p *ptx) f(format string, args ...any) { fmt.Fprintf(p, format+"\n", args...) }

// compress makes %h0 to %h7 the chaining value of the block %m0 to %m15, by the chaining value in them, the counter in
// %counter and the flags in %flags.
func (p *ptx) compress() {
	for i := range 8 {
		p.f("mov.u32 %%v%d, %%h%d;", i, i)
	}
	for i := range 4 {
		p.f("mov.u32 %%v%d, %d;", 8+i, blakeIV[i])
	}
	p.f("mov.u32 %%v12, %%counter;\nmov.u32 %%v13, 0;\nmov.u32 %%v14, 64;\nmov.u32 %%v15, %%flags;")
	words := [16]int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	for range 7 {
		for i, at := range blakeMixes {
			p.mix(at, words[2*i], words[2*i+1])
		}
		var next [16]int
		for i, from := range blakePermute {
			next[i] = words[from]
		}
		words = next
	}
	for i := range 8 {
		p.f("xor.b32 %%h%d, %%v%d, %%v%d;", i, i, i+8)
	}
}

func (p *ptx) mix(at [4]int, x, y int) {
	half := func(word, first, second int) {
		a, b, c, d := at[0], at[1], at[2], at[3]
		p.f("add.u32 %%v%d, %%v%d, %%v%d;", a, a, b)
		p.f("add.u32 %%v%d, %%v%d, %%m%d;", a, a, word)
		p.f("xor.b32 %%v%d, %%v%d, %%v%d;", d, d, a)
		p.f("shf.r.wrap.b32 %%v%d, %%v%d, %%v%d, %d;", d, d, d, first)
		p.f("add.u32 %%v%d, %%v%d, %%v%d;", c, c, d)
		p.f("xor.b32 %%v%d, %%v%d, %%v%d;", b, b, c)
		p.f("shf.r.wrap.b32 %%v%d, %%v%d, %%v%d, %d;", b, b, b, second)
	}
	half(x, 16, 12)
	half(y, 8, 7)
}

// load loads %m0 to %m15 from an address.
func (p *ptx) load(space, address string) {
	for i := 0; i < 16; i += 4 {
		p.f("ld.%s.v4.u32 {%%m%d, %%m%d, %%m%d, %%m%d}, [%s+%d];", space, i, i+1, i+2, i+3, address, 4*i)
	}
}

// start makes %h0 to %h7 BLAKE3's own key.
func (p *ptx) start() {
	for i, word := range blakeIV {
		p.f("mov.u32 %%h%d, %d;", i, word)
	}
}

// keep stores %h0 to %h7 in shared memory.
func (p *ptx) keep(address string) {
	for i := 0; i < 8; i += 4 {
		p.f("st.shared.v4.u32 [%s+%d], {%%h%d, %%h%d, %%h%d, %%h%d};", address, 4*i, i, i+1, i+2, i+3)
	}
}

// digestText returns the kernel: gpuckpt_digest(memory, results, first). Each block of digestThreads threads takes the
// part of its number in memory, which is part first of what is digested, and writes its result.
func digestText() string {
	const chunks, value = partBytes / chunkOfBlake, 32
	p := &ptx{}
	p.f(".version 6.4\n.target sm_75\n.address_size 64")
	p.f(".visible .entry %s(.param .u64 memory, .param .u64 results, .param .u32 first)\n.maxntid %d, 1, 1\n{", digestKernel, digestThreads)
	p.f(".reg .pred %%p, %%q;\n.reg .b32 %%v<16>, %%m<16>, %%h<8>;")
	p.f(".reg .b32 %%counter, %%flags, %%thread, %%block, %%base, %%chunk, %%i, %%n, %%from, %%to, %%at, %%tree, %%any, %%some;")
	p.f(".reg .b64 %%memory, %%results, %%address, %%offset;")
	p.f(".shared .align 16 .b8 tree[%d];", chunks*value+chunks/2*value)
	p.f("mov.u32 %%thread, %%tid.x;\nmov.u32 %%block, %%ctaid.x;\nmov.u32 %%tree, tree;\nmov.u32 %%any, 0;")
	p.f("ld.param.u64 %%memory, [memory];\nld.param.u64 %%results, [results];\nld.param.u32 %%base, [first];")
	p.f("mul.wide.u32 %%offset, %%block, %d;\nadd.u64 %%memory, %%memory, %%offset;", partBytes)
	p.f("add.u32 %%base, %%base, %%block;\nand.b32 %%base, %%base, %d;\nmul.lo.u32 %%base, %%base, %d;", partsInBlock-1, chunks)

	p.f("mov.u32 %%chunk, %%thread;\nCHUNK:")
	p.f("mul.wide.u32 %%offset, %%chunk, %d;\nadd.u64 %%address, %%memory, %%offset;", chunkOfBlake)
	p.f("add.u32 %%counter, %%base, %%chunk;\nmov.u32 %%i, 0;")
	p.start()
	p.f("BLOCK:")
	p.load("global", "%address")
	for i := range 16 {
		p.f("or.b32 %%any, %%any, %%m%d;", i)
	}
	p.f("setp.eq.u32 %%p, %%i, 0;\nselp.u32 %%flags, %d, 0, %%p;", chunkStart)
	p.f("setp.eq.u32 %%p, %%i, 15;\nselp.u32 %%flags, %d, %%flags, %%p;", chunkEnd)
	p.compress()
	p.f("add.u64 %%address, %%address, 64;\nadd.u32 %%i, %%i, 1;\nsetp.lt.u32 %%p, %%i, 16;\n@%%p bra BLOCK;")
	p.f("mul.lo.u32 %%at, %%chunk, %d;\nadd.u32 %%at, %%at, %%tree;", value)
	p.keep("%at")
	p.f("add.u32 %%chunk, %%chunk, %d;\nsetp.lt.u32 %%p, %%chunk, %d;\n@%%p bra CHUNK;", digestThreads, chunks)

	// Each level of the tree is made in the half of the room that the level before is not in.
	p.f("bar.sync 0;\nmov.u32 %%counter, 0;\nmov.u32 %%flags, %d;", parent)
	p.f("mov.u32 %%n, %d;\nmov.u32 %%from, %%tree;\nadd.u32 %%to, %%tree, %d;\nLEVEL:", chunks/2, chunks*value)
	p.f("mov.u32 %%i, %%thread;\nPARENT:\nsetp.ge.u32 %%p, %%i, %%n;\n@%%p bra NEXT;")
	p.f("mul.lo.u32 %%at, %%i, %d;\nadd.u32 %%at, %%at, %%from;", 2*value)
	p.start()
	p.load("shared", "%at")
	p.compress()
	p.f("mul.lo.u32 %%at, %%i, %d;\nadd.u32 %%at, %%at, %%to;", value)
	p.keep("%at")
	p.f("add.u32 %%i, %%i, %d;\nbra PARENT;", digestThreads)
	p.f("NEXT:\nbar.sync 0;\nmov.u32 %%at, %%from;\nmov.u32 %%from, %%to;\nmov.u32 %%to, %%at;")
	p.f("shr.u32 %%n, %%n, 1;\nsetp.ne.u32 %%p, %%n, 0;\n@%%p bra LEVEL;")

	p.f("setp.ne.u32 %%p, %%any, 0;\nbar.red.or.pred %%q, 0, %%p;\nsetp.ne.u32 %%p, %%thread, 0;\n@%%p bra END;")
	p.f("selp.u32 %%some, %d, %d, %%q;", partHasData, partIsZeros)
	p.f("mul.wide.u32 %%offset, %%block, %d;\nadd.u64 %%results, %%results, %%offset;", 4*resultWords)
	for i := range 8 {
		p.f("ld.shared.u32 %%h%d, [%%from+%d];\nst.global.u32 [%%results+%d], %%h%d;", i, 4*i, 4*i, i)
	}
	p.f("membar.sys;\nst.global.u32 [%%results+32], %%some;\nEND:\nret;\n}")
	return p.String()
}
