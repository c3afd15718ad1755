// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/elastic/go-seccomp-bpf/arch"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// x32 marks the numbers of calls of x32 programs (asm/unistd.h, __X32_SYSCALL_BIT).
const x32 = 0x40000000

// abi is one way to make system calls on x86-64, the only processor whose dumps are restored.
type abi struct {
	name  string // in a profile; that of the native one is specs.ArchX86_64
	token uint32 // as a filter sees it
	info  *arch.Info
	mark  uint32 // in a call's number
}

func abis() []abi {
	return []abi{
		{string(specs.ArchX86_64), unix.AUDIT_ARCH_X86_64, arch.X86_64, 0},
		{string(specs.ArchX86), unix.AUDIT_ARCH_I386, arch.I386, 0},
		{string(specs.ArchX32), unix.AUDIT_ARCH_X86_64, arch.X32, x32},
	}
}

// abiOf returns the one that a call is made by, by its name in a profile.
func abiOf(number, token uint32) string {
	switch {
	case token == unix.AUDIT_ARCH_I386:
		return string(specs.ArchX86)
	case number&x32 != 0:
		return string(specs.ArchX32)
	}
	return string(specs.ArchX86_64)
}

// nameOf names a call for people.
func nameOf(c *call) string {
	for _, a := range abis() {
		if a.name != abiOf(c[wordNumber], c[wordArch]) {
			continue
		}
		name, known := a.info.SyscallNumbers[int(c[wordNumber]&^a.mark)]
		if !known {
			name = fmt.Sprintf("system call %d", c[wordNumber]&^a.mark)
		}
		return fmt.Sprintf("%s (%s, arguments from %#x, %#x)", name, a.info.Name, c[wordArgs], c[wordArgs+2])
	}
	return ""
}

// multiplexed are calls that i386 programs also make by another one, which has the number of the call
// as its first argument: socketcall (linux/net.h) and ipc (asm/ipc.h). libseccomp adds those.
var multiplexed = map[string]map[string]uint64{
	"socketcall": {
		"socket": 1, "bind": 2, "connect": 3, "listen": 4, "accept": 5, "getsockname": 6, "getpeername": 7, "socketpair": 8, "send": 9, "recv": 10,
		"sendto": 11, "recvfrom": 12, "shutdown": 13, "setsockopt": 14, "getsockopt": 15, "sendmsg": 16, "recvmsg": 17, "accept4": 18, "recvmmsg": 19, "sendmmsg": 20,
	},
	"ipc": {
		"semop": 1, "semget": 2, "semctl": 3, "semtimedop": 4, "msgsnd": 11, "msgrcv": 12, "msgget": 13, "msgctl": 14, "shmat": 21, "shmdt": 22, "shmget": 23, "shmctl": 24,
	},
}

// rule is what a profile says of one call.
type rule struct {
	is   permission
	args []specs.LinuxSeccompArg // all must hold
}

// key is a call by its number, and its architecture as a filter sees it.
type key struct{ number, arch uint32 }

// rules are a profile as runc hands it to libseccomp.
type rules struct {
	other permission // of calls without a rule
	abis  map[string]bool
	calls map[key][]rule
}

// numbersOf returns the numbers of calls by the names of abis and calls.
var numbersOf = sync.OnceValue(func() map[string]map[string]uint32 {
	numbers := make(map[string]map[string]uint32)
	for _, a := range abis() {
		numbers[a.name] = make(map[string]uint32, len(a.info.SyscallNumbers))
		for n, name := range a.info.SyscallNumbers {
			// Of two numbers the lower one is not for x32 programs, though the list has it (syscall_64.tbl).
			numbers[a.name][name] = max(numbers[a.name][name], uint32(n))
		}
	}
	return numbers
})

// newRules takes a profile apart. Names that nobody knows are left out, as by runc.
func newRules(profile *specs.LinuxSeccomp) (*rules, error) {
	r := &rules{abis: map[string]bool{string(specs.ArchX86_64): true}, calls: make(map[key][]rule)}
	var err error
	if r.other, err = permissionIn(profile.DefaultAction); err != nil {
		return nil, err
	}
	for _, a := range profile.Architectures {
		r.abis[string(a)] = true
	}
	numbers := numbersOf()
	for _, s := range profile.Syscalls {
		is, err := permissionIn(s.Action)
		if err != nil {
			return nil, err
		}
		if is == r.other {
			continue
		}
		for _, name := range s.Names {
			for _, a := range abis() {
				if !r.abis[a.name] {
					continue
				}
				if n, known := numbers[a.name][name]; known {
					r.add(key{n | a.mark, a.token}, is, s.Args)
				}
				if a.info != arch.I386 {
					continue
				}
				for by, calls := range multiplexed {
					if n, ok := calls[name]; ok {
						r.add(key{uint32(a.info.SyscallNames[by]), a.token}, is, multiplexedArgs(n, s.Args))
					}
				}
			}
		}
	}
	return r, nil
}

// multiplexedArgs returns the conditions of a rule for a multiplexed call: libseccomp puts its number in
// the place of a first argument, and leaves conditions for the others (arch-x86.c, x86_rule_add).
func multiplexedArgs(number uint64, args []specs.LinuxSeccompArg) []specs.LinuxSeccompArg {
	all := []specs.LinuxSeccompArg{{Value: number, Op: specs.OpEqualTo}}
	for _, a := range args {
		if a.Index != 0 {
			all = append(all, a)
		}
	}
	return all
}

// add adds a rule. One with two conditions for the same argument is two rules (runc, matchCall).
func (r *rules) add(k key, is permission, args []specs.LinuxSeccompArg) {
	seen := make(map[uint]bool)
	for _, a := range args {
		if seen[a.Index] {
			for _, each := range args {
				r.calls[k] = append(r.calls[k], rule{is, []specs.LinuxSeccompArg{each}})
			}
			return
		}
		seen[a.Index] = true
	}
	r.calls[k] = append(r.calls[k], rule{is, args})
}

func permissionIn(action specs.LinuxSeccompAction) (permission, error) {
	switch action {
	case specs.ActAllow, specs.ActLog:
		return executed, nil
	case specs.ActTrace, specs.ActNotify:
		return asked, nil
	case specs.ActKill, specs.ActKillProcess, specs.ActKillThread, specs.ActTrap, specs.ActErrno:
		return denied, nil
	}
	return denied, fmt.Errorf("the spec's seccomp profile has the unknown action %q", action)
}

// of returns what a profile has become of a call. Where rules contradict each other it is the weakest.
func (r *rules) of(c *call) permission {
	if !r.abis[abiOf(c[wordNumber], c[wordArch])] {
		return denied // libseccomp kills
	}
	is, found := denied, false
	for _, rule := range r.calls[key{c[wordNumber], c[wordArch]}] {
		if !slices.ContainsFunc(rule.args, func(arg specs.LinuxSeccompArg) bool { return !holds(arg, c) }) {
			is, found = max(is, rule.is), true
		}
	}
	if !found {
		return r.other
	}
	return is
}

// holds reports whether an argument is as a profile has it.
func holds(arg specs.LinuxSeccompArg, c *call) bool {
	if arg.Index > 5 {
		return false
	}
	at := wordArgs + 2*arg.Index
	have := uint64(c[at]) | uint64(c[at+1])<<32
	if short(c[wordNumber], c[wordArch]) {
		have, arg.Value, arg.ValueTwo = uint64(c[at]), arg.Value&math.MaxUint32, arg.ValueTwo&math.MaxUint32
	}
	switch arg.Op {
	case specs.OpEqualTo:
		return have == arg.Value
	case specs.OpNotEqual:
		return have != arg.Value
	case specs.OpLessThan:
		return have < arg.Value
	case specs.OpLessEqual:
		return have <= arg.Value
	case specs.OpGreaterThan:
		return have > arg.Value
	case specs.OpGreaterEqual:
		return have >= arg.Value
	case specs.OpMaskedEqual:
		return have&arg.Value == arg.ValueTwo
	}
	return false
}

// short reports whether libseccomp compares the lower words of a call's arguments alone: those of
// programs whose pointers have 32 bits.
func short(number, arch uint32) bool { return arch != unix.AUDIT_ARCH_X86_64 || number&x32 != 0 }

// compared notes what the profile compares the arguments of a call with.
func (r *rules) compared(number, arch uint32, with *cells) error {
	for _, rule := range r.calls[key{number, arch}] {
		for _, arg := range rule.args {
			if arg.Index > 5 {
				return fmt.Errorf("the spec's seccomp profile has a condition on argument %d", arg.Index)
			}
			for half := range uint(2) {
				if half == 1 && short(number, arch) {
					continue
				}
				w := with.word(wordArgs + 2*int(arg.Index) + int(half))
				value, second := uint32(arg.Value>>(32*half)), uint32(arg.ValueTwo>>(32*half))
				if arg.Op != specs.OpMaskedEqual {
					w.point(value)
				} else if err := w.class(value, second); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// numbers returns the numbers of calls that a filter with these constants and a profile can tell apart.
func numbers(constants []uint32, token uint32, r *rules) []uint32 {
	all := append(slices.Clone(constants), 0, x32, math.MaxUint32-1)
	for k := range r.calls {
		if k.arch == token {
			all = append(all, k.number, k.number+1)
		}
	}
	slices.Sort(all)
	all = slices.Compact(all)
	// No call has the last one, and libseccomp's filters say nothing of it.
	return slices.DeleteFunc(all, func(n uint32) bool { return n == math.MaxUint32 })
}
