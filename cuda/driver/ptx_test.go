// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"testing"

	"lukechampine.com/blake3/guts"
)

// onH200 is what the kernel said on an H200 (driver 580.159.04) of 4 MiB, in which byte i is the top byte of the lower word
// of i*2654435761, but for the third MiB, which is zeros. The first part was part 62.
var onH200 = [4][resultWords]uint32{
	{0x25c7115c, 0x18c6689a, 0x2c0f6187, 0x6502f4ad, 0x06b2bf3a, 0x729d2b9a, 0x536215d1, 0x774bce68, partHasData},
	{0xab3b6f22, 0x07323f20, 0x5cf16dd1, 0xc8e9a692, 0x07c159fa, 0xdccab486, 0xcd7e4906, 0x67adb941, partHasData},
	{0xb6b2bf1d, 0x04cd6a09, 0x6a440695, 0x4b67cec2, 0xc29d9353, 0x9ac9426c, 0x0a6723e9, 0xd5de15c3, partIsZeros},
	{0xbaa1912f, 0x077fb394, 0x8accd176, 0x085168bf, 0xae82196c, 0x8b9a6dcd, 0x92065ca7, 0x3632b07c, partHasData},
}

func onH200Memory() []byte {
	memory := make([]byte, 4*partBytes)
	for i := range memory {
		if i/partBytes != 2 {
			memory[i] = byte(uint32(i*2654435761) >> 24)
		}
	}
	return memory
}

// What a real GPU has computed is BLAKE3.
func TestDigestOnRealGPU(t *testing.T) {
	memory := onH200Memory()
	for i, got := range onH200 {
		if want := partOf(memory[i*partBytes:][:partBytes], uint64(62+i)%partsInBlock); [8]uint32(got[:8]) != want {
			t.Errorf("part %d: %x, want %x", i, got[:8], want)
		}
	}
}

// partOf returns a part's value, by its number in a block.
func partOf(part []byte, number uint64) [8]uint32 {
	var values [][8]uint32
	for at := 0; at < len(part); at += chunkOfBlake {
		var buffer [guts.MaxSIMD * guts.ChunkSize]byte
		copy(buffer[:], part[at:at+chunkOfBlake])
		counter := number*partBytes/chunkOfBlake + uint64(at/chunkOfBlake)
		values = append(values, guts.ChainingValue(guts.CompressBuffer(&buffer, chunkOfBlake, &guts.IV, counter, 0)))
	}
	for ; len(values) > 1; values = values[:len(values)/2] {
		for i := range len(values) / 2 {
			values[i] = guts.ChainingValue(guts.ParentNode(values[2*i], values[2*i+1], &guts.IV, 0))
		}
	}
	return values[0]
}

// The instructions of the kernel, executed one by one, are what a real GPU has computed.
func TestDigestText(t *testing.T) {
	memory := onH200Memory()
	for _, part := range []int{1, 2} {
		g := newGPU(t, digestText(), memory[part*partBytes:][:partBytes])
		g.run(digestThreads, 62+part)
		got := make([]uint32, resultWords)
		for i := range got {
			got[i] = binary.LittleEndian.Uint32(g.results[4*i:])
		}
		if !slices.Equal(got, onH200[part][:]) {
			t.Errorf("part %d: %x, want %x", part, got, onH200[part])
		}
	}
}

// gpu executes PTX text for one block of threads. It knows the instructions of the kernel, and no others.
type gpu struct {
	t               *testing.T
	program         []instruction
	labels          map[string]int
	registers       map[string]int
	memory, results []byte
	shared          []byte
	waiting         []bool // the predicates that come to a barrier
}

// instruction is one, with its registers' numbers for operands, or constants.
type instruction struct {
	name     string
	operands []operand
	guard    int // the predicate, or -1
}

type operand struct {
	register int // -1: none
	value    uint64
	text     string
}

// Addresses of the kernel's parameters.
const memoryAt, resultsAt, sharedAt = 1 << 40, 2 << 40, 1 << 20

func newGPU(t *testing.T, text string, memory []byte) *gpu {
	t.Helper()
	g := &gpu{t: t, labels: make(map[string]int), registers: make(map[string]int), memory: memory, results: make([]byte, 4*resultWords), shared: make([]byte, 48<<10)}
	_, body, _ := strings.Cut(text, "{\n")
	for line := range strings.Lines(body) {
		line = strings.TrimSuffix(strings.TrimSpace(line), ";")
		switch {
		case line == "" || line == "}" || strings.HasPrefix(line, ".reg") || strings.HasPrefix(line, ".shared"):
			continue
		case strings.HasSuffix(line, ":"):
			g.labels[strings.TrimSuffix(line, ":")] = len(g.program)
			continue
		}
		i := instruction{guard: -1}
		if strings.HasPrefix(line, "@") {
			var guard string
			guard, line, _ = strings.Cut(line[1:], " ")
			i.guard = g.register(guard)
		}
		name, rest, _ := strings.Cut(line, " ")
		i.name = name
		for _, word := range strings.FieldsFunc(rest, func(r rune) bool { return strings.ContainsRune(", {}[]+", r) }) {
			i.operands = append(i.operands, g.operand(word))
		}
		g.program = append(g.program, i)
	}
	return g
}

func (g *gpu) register(name string) int {
	if _, ok := g.registers[name]; !ok {
		g.registers[name] = len(g.registers)
	}
	return g.registers[name]
}

func (g *gpu) operand(word string) operand {
	if n, err := strconv.ParseUint(word, 10, 64); err == nil {
		return operand{-1, n, word}
	}
	if strings.HasPrefix(word, "%") && word != "%tid.x" && word != "%ctaid.x" {
		return operand{g.register(word), 0, word}
	}
	return operand{-1, map[string]uint64{"memory": memoryAt, "results": resultsAt, "tree": sharedAt}[word], word}
}

// run has all threads run from barrier to barrier.
func (g *gpu) run(threads, first int) {
	at := make([]int, threads)
	registers := make([][]uint64, threads)
	for i := range registers {
		registers[i] = make([]uint64, len(g.registers))
	}
	for ended := 0; ended < threads; {
		ended = 0
		any := false
		for _, p := range g.waiting {
			any = any || p
		}
		g.waiting = nil
		for i := range threads {
			if at[i] < len(g.program) && at[i] > 0 && g.program[at[i]-1].name == "bar.red.or.pred" {
				registers[i][g.program[at[i]-1].operands[0].register] = truth(any)
			}
			if at[i] = g.until(at[i], registers[i], i, first); at[i] == len(g.program) {
				ended++
			}
		}
		if ended != 0 && ended != threads {
			g.t.Fatal("some threads wait at a barrier, and others have ended")
		}
	}
}

func truth(is bool) uint64 {
	if is {
		return 1
	}
	return 0
}

// until executes a thread's instructions up to a barrier, or the end, and returns where it goes on.
func (g *gpu) until(at int, r []uint64, thread, first int) int {
	for at < len(g.program) {
		i := &g.program[at]
		at++
		if i.guard >= 0 && r[i.guard] == 0 {
			continue
		}
		v := func(n int) uint64 {
			if o := i.operands[n]; o.register >= 0 {
				return r[o.register]
			} else {
				return o.value
			}
		}
		set := func(x uint64) { r[i.operands[0].register] = x }
		switch i.name {
		case "mov.u32":
			switch i.operands[1].text {
			case "%tid.x":
				set(uint64(thread))
			case "%ctaid.x":
				set(0)
			default:
				set(v(1))
			}
		case "ld.param.u64":
			set(v(1))
		case "ld.param.u32":
			set(uint64(first))
		case "add.u32":
			set(uint64(uint32(v(1) + v(2))))
		case "add.u64":
			set(v(1) + v(2))
		case "xor.b32":
			set(v(1) ^ v(2))
		case "or.b32":
			set(v(1) | v(2))
		case "and.b32":
			set(v(1) & v(2))
		case "shr.u32":
			set(v(1) >> v(2))
		case "shf.r.wrap.b32":
			if i.operands[1].register != i.operands[2].register {
				g.t.Fatal("a funnel shift of two words")
			}
			set(uint64(bits.RotateLeft32(uint32(v(1)), -int(v(3)))))
		case "mul.wide.u32":
			set(v(1) * v(2))
		case "mul.lo.u32":
			set(uint64(uint32(v(1) * v(2))))
		case "setp.eq.u32":
			set(truth(v(1) == v(2)))
		case "setp.ne.u32":
			set(truth(v(1) != v(2)))
		case "setp.lt.u32":
			set(truth(v(1) < v(2)))
		case "setp.ge.u32":
			set(truth(v(1) >= v(2)))
		case "selp.u32":
			if v(3) != 0 {
				set(v(1))
			} else {
				set(v(2))
			}
		case "ld.global.v4.u32", "ld.shared.v4.u32":
			for n := range 4 {
				r[i.operands[n].register] = uint64(binary.LittleEndian.Uint32(g.at(v(4)+v(5)+uint64(4*n), 4)))
			}
		case "ld.shared.u32":
			set(uint64(binary.LittleEndian.Uint32(g.at(v(1)+v(2), 4))))
		case "st.shared.v4.u32":
			for n := range 4 {
				binary.LittleEndian.PutUint32(g.at(v(0)+v(1)+uint64(4*n), 4), uint32(v(2+n)))
			}
		case "st.global.u32":
			binary.LittleEndian.PutUint32(g.at(v(0)+v(1), 4), uint32(v(2)))
		case "bra":
			at = g.labels[i.operands[0].text]
		case "membar.sys":
		case "bar.sync":
			return at
		case "bar.red.or.pred":
			g.waiting = append(g.waiting, v(2) != 0)
			return at
		case "ret":
			return len(g.program)
		default:
			g.t.Fatalf("%s is not known here", i.name)
		}
	}
	return at
}

// at returns memory by its address.
func (g *gpu) at(address uint64, bytes int) []byte {
	for base, room := range map[uint64][]byte{memoryAt: g.memory, resultsAt: g.results, sharedAt: g.shared} {
		if address >= base && address+uint64(bytes) <= base+uint64(len(room)) {
			return room[address-base:][:bytes]
		}
	}
	g.t.Fatalf("nothing is at %#x", address)
	return nil
}
