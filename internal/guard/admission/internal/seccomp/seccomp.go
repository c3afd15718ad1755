// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package seccomp judges seccomp filters: whether a filter, a program of classic BPF that a dump has,
// is at least as strict as a container's profile.
//
// Equality with what runc compiles would refuse the filters of another version of libseccomp. So the
// filter is run, on one set of arguments of every kind that the filter or the profile can tell apart
// (package-internal type cells). It must execute no system call that the profile does not. What
// becomes of a call that is not executed (an error, a signal) is not compared.
//
// A filter can compare the number and the architecture of a call with constants, and each word of its
// arguments with constants, by at most one mask. libseccomp writes no others. Any other filter is not
// judged, which is an error.
package seccomp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// errNotJudged reports a filter that libseccomp does not write.
var errNotJudged = errors.New("it is no filter that runc makes of a profile, and cannot be compared with one")

// maxInstructions is the kernel's bound (BPF_MAXINSNS).
const maxInstructions = 4096

// maxSteps bounds the work for one filter: instructions that are run.
const maxSteps = 50_000_000

// instruction is one of classic BPF (linux/filter.h).
type instruction struct {
	code   uint16
	jt, jf uint8
	k      uint32
}

// The instructions that libseccomp writes.
const (
	load   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	and    = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	equal  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	above  = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
	atMin  = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
	common = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	jump   = unix.BPF_JMP | unix.BPF_JA
	answer = unix.BPF_RET | unix.BPF_K
)

// Words of struct seccomp_data: the number, the architecture, where the call was made, six arguments
// of two words each, the lower one first.
const (
	wordNumber = 0
	wordArch   = 1
	wordArgs   = 4
	words      = 16
)

// call is what a filter sees.
type call [words]uint32

// permission is what becomes of a call: it is not executed; somebody else is asked; it is executed.
type permission int

const (
	denied permission = iota
	asked
	executed
)

// permissionOf returns what the kernel does for what a filter returns.
func permissionOf(action uint32) permission {
	switch action & 0xffff0000 { // SECCOMP_RET_ACTION_FULL
	case 0x7fff0000, 0x7ffc0000: // allow, log
		return executed
	case 0x7ff00000, 0x7fc00000: // trace, notify
		return asked
	}
	return denied // errors and signals; the kernel kills for what it does not know
}

// Filter is a filter that can be judged.
type Filter struct {
	program []instruction
	steps   int
}

// Parse reads a filter's program as CRIU has it. It refuses what the kernel would, and what libseccomp
// does not write.
func Parse(data []byte) (*Filter, error) {
	n := len(data) / 8
	if n == 0 || n > maxInstructions || len(data)%8 != 0 {
		return nil, fmt.Errorf("%w (%d bytes)", errNotJudged, len(data))
	}
	f := &Filter{program: make([]instruction, n)}
	for i := range f.program {
		b := data[8*i:]
		in := instruction{binary.LittleEndian.Uint16(b), b[2], b[3], binary.LittleEndian.Uint32(b[4:])}
		f.program[i] = in
		last := i + 1 // that it can go to
		switch in.code {
		case load:
			if word := in.k / 4; in.k%4 != 0 || word >= words || word > wordArch && word < wordArgs {
				return nil, fmt.Errorf("%w (instruction %d loads word %d)", errNotJudged, i, in.k/4)
			}
		case and:
		case equal, above, atMin, common:
			last = i + 1 + int(max(in.jt, in.jf))
		case jump:
			if in.k > maxInstructions {
				return nil, fmt.Errorf("%w (instruction %d)", errNotJudged, i)
			}
			last = i + 1 + int(in.k)
		case answer:
			last = 0
		default:
			return nil, fmt.Errorf("%w (instruction %d has the code %#x)", errNotJudged, i, in.code)
		}
		if last >= n {
			return nil, fmt.Errorf("%w (instruction %d leads out of it)", errNotJudged, i)
		}
	}
	return f, nil
}

// run returns what becomes of a call.
func (f *Filter) run(c *call) permission {
	a := uint32(0)
	for pc := 0; ; pc++ {
		f.steps++
		switch in := f.program[pc]; in.code {
		case load:
			a = c[in.k/4]
		case and:
			a &= in.k
		case jump:
			pc += int(in.k)
		case answer:
			return permissionOf(in.k)
		default:
			pc += int(in.next(a))
		}
	}
}

// next returns how far a comparison jumps.
func (in instruction) next(a uint32) uint8 {
	var is bool
	switch in.code {
	case equal:
		is = a == in.k
	case above:
		is = a > in.k
	case atMin:
		is = a >= in.k
	case common:
		is = a&in.k != 0
	}
	if is {
		return in.jt
	}
	return in.jf
}

// compared notes what the filter can compare arguments of a call with, by its number and architecture
// alone.
func (f *Filter) compared(number, arch uint32, with *cells) error {
	type state struct {
		pc   int
		word int // of an argument, or -1 for what is known
		a    uint32
		mask uint32
	}
	var seen map[state]bool // of those after a comparison that may go either way
	next := []state{{0, -1, 0, math.MaxUint32}}
	for len(next) > 0 {
		s := next[len(next)-1]
		next = next[:len(next)-1]
		if f.steps++; f.steps > maxSteps {
			return errNotJudged
		}
		if seen != nil {
			if seen[s] {
				continue
			}
			seen[s] = true
		}
		in := f.program[s.pc]
		s.pc++
		switch {
		case in.code == answer:
			continue
		case in.code == jump:
			s.pc += int(in.k)
		case in.code == load:
			s.word, s.a, s.mask = -1, 0, math.MaxUint32
			switch word := int(in.k / 4); word {
			case wordNumber:
				s.a = number
			case wordArch:
				s.a = arch
			default:
				s.word = word
			}
		case in.code == and:
			s.a &= in.k
			s.mask &= in.k
		case s.word < 0:
			s.pc += int(in.next(s.a))
		default:
			if err := with.note(s.word, s.mask, in); err != nil {
				return err
			}
			if seen == nil {
				seen = make(map[state]bool)
			}
			other := s
			other.pc += int(in.jf)
			next = append(next, other)
			s.pc += int(in.jt)
		}
		next = append(next, s)
	}
	return nil
}

// Within refuses a filter that executes a system call that the profile does not. The error names the
// call.
func (f *Filter) Within(profile *specs.LinuxSeccomp) error {
	rules, err := newRules(profile)
	if err != nil {
		return err
	}
	f.steps = 0
	constants := f.constants()
	for _, arch := range []uint32{unix.AUDIT_ARCH_X86_64, unix.AUDIT_ARCH_I386} { // the kernel has no others here
		for _, number := range numbers(constants, arch, rules) {
			with := new(cells)
			if err := f.compared(number, arch, with); err != nil {
				return err
			}
			if err := rules.compared(number, arch, with); err != nil {
				return err
			}
			err := with.each(func(c *call) error {
				c[wordNumber], c[wordArch] = number, arch
				if have, most := f.run(c), rules.of(c); have > most {
					return fmt.Errorf("it allows %s, which the spec's profile does not", nameOf(c))
				}
				if f.steps > maxSteps {
					return errNotJudged
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// constants returns what the filter compares anything with, and the numbers beside those.
func (f *Filter) constants() (all []uint32) {
	for _, in := range f.program {
		switch in.code {
		case equal, above, atMin, common:
			all = append(all, in.k-1, in.k, in.k+1)
		}
	}
	return all
}
