// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// containerds is the profile of containerd 2.4 for a container with its default capabilities, and the
// filter that runc 1.5.2 with libseccomp 2.5.4 makes of it, taken from a dump.
func containerds(t testing.TB) (*specs.LinuxSeccomp, []byte) {
	t.Helper()
	profile := new(specs.LinuxSeccomp)
	data, err := os.ReadFile("testdata/containerd.json")
	if err == nil {
		err = json.Unmarshal(data, profile)
	}
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("testdata/containerd.bpf")
	if err != nil {
		t.Fatal(err)
	}
	return profile, program
}

func judge(program []byte, profile *specs.LinuxSeccomp) error {
	f, err := Parse(program)
	if err != nil {
		return err
	}
	return f.Within(profile)
}

// bpf writes a program.
func bpf(program ...instruction) (b []byte) {
	for _, in := range program {
		b = append(binary.LittleEndian.AppendUint16(b, in.code), in.jt, in.jf)
		b = binary.LittleEndian.AppendUint32(b, in.k)
	}
	return b
}

var (
	allow = instruction{answer, 0, 0, 0x7fff0000}
	deny  = instruction{answer, 0, 0, 0x00050001}
)

func loads(word uint32) instruction { return instruction{load, 0, 0, 4 * word} }

// arg is the lower word of an argument.
func arg(n uint32) uint32 { return wordArgs + 2*n }

// A filter is taken with the profile that it was made of, and with no profile that allows less.
func TestContainerdsProfile(t *testing.T) {
	profile, program := containerds(t)
	if err := judge(program, profile); err != nil {
		t.Fatal(err)
	}
	// Without any one of its calls, or conditions, the profile is stricter than the filter.
	f, err := Parse(program)
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	for i, s := range profile.Syscalls {
		for j, name := range s.Names {
			// libseccomp 2.5.4 does not know all of them.
			number, known := numbersOf()[string(specs.ArchX86_64)][name]
			if !allowedOnce(profile, name) || !known || f.run(&call{number, unix.AUDIT_ARCH_X86_64}) == denied {
				continue
			}
			tried++
			less := *profile
			less.Syscalls = slices.Clone(profile.Syscalls)
			less.Syscalls[i].Names = slices.Delete(slices.Clone(s.Names), j, j+1)
			if err := judge(program, &less); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("without %s: %v", name, err)
			}
		}
		if len(s.Args) > 0 {
			less := *profile
			less.Syscalls = slices.Delete(slices.Clone(profile.Syscalls), i, i+1)
			if err := judge(program, &less); err == nil || !strings.Contains(err.Error(), s.Names[0]) {
				t.Errorf("without the rule for %v of %v: %v", s.Args, s.Names, err)
			}
		}
	}
	if tried < 250 {
		t.Errorf("%d calls of the profile were tried", tried)
	}
}

// allowedOnce reports whether one rule of a profile has a call.
func allowedOnce(profile *specs.LinuxSeccomp, name string) bool {
	n := 0
	for _, s := range profile.Syscalls {
		if slices.Contains(s.Names, name) {
			n++
		}
	}
	return n == 1
}

// An instruction that denies a call, and is changed to allow it, is found.
func TestOneInstruction(t *testing.T) {
	profile, program := containerds(t)
	found := 0
	var missed []int
	for at := 0; at < len(program); at += 8 {
		in := program[at:]
		if binary.LittleEndian.Uint16(in) != answer || permissionOf(binary.LittleEndian.Uint32(in[4:])) == executed {
			continue
		}
		changed := slices.Clone(program)
		binary.LittleEndian.PutUint32(changed[at+4:], 0x7fff0000)
		if judge(changed, profile) != nil {
			found++
		} else {
			missed = append(missed, at/8)
		}
	}
	// What kills calls of other architectures than the kernel has here, in two places.
	if found < 5 || !slices.Equal(missed, []int{804, 1272}) {
		t.Errorf("%d instructions that deny must, %v need not", found, missed)
	}
}

func TestWithin(t *testing.T) {
	is := func(value uint64, op specs.LinuxSeccompOperator, second uint64) []specs.LinuxSeccompArg {
		return []specs.LinuxSeccompArg{{Index: 0, Value: value, ValueTwo: second, Op: op}}
	}
	profile := func(other specs.LinuxSeccompAction, rules ...specs.LinuxSyscall) *specs.LinuxSeccomp {
		return &specs.LinuxSeccomp{DefaultAction: other, Syscalls: rules}
	}
	rule := func(action specs.LinuxSeccompAction, args []specs.LinuxSeccompArg, names ...string) specs.LinuxSyscall {
		return specs.LinuxSyscall{Names: names, Action: action, Args: args}
	}
	// native is a program for calls of x86-64 programs, all others are denied.
	native := func(program ...instruction) []byte {
		return bpf(slices.Concat([]instruction{
			loads(wordArch), {equal, 1, 0, unix.AUDIT_ARCH_X86_64}, deny,
			loads(wordNumber), {atMin, 0, 1, x32}, deny,
		}, program)...)
	}
	only := func(number uint32, program ...instruction) []byte {
		return native(append([]instruction{{equal, 1, 0, number}, deny}, program...)...)
	}
	personality := func(args []specs.LinuxSeccompArg) *specs.LinuxSeccomp {
		return profile(specs.ActErrno, rule(specs.ActAllow, args, "personality"))
	}
	const number = unix.SYS_PERSONALITY
	for name, c := range map[string]struct {
		program []byte
		profile *specs.LinuxSeccomp
		says    string // "" if it is taken
	}{
		"allows all":                        {bpf(allow), profile(specs.ActErrno, rule(specs.ActAllow, nil, "read")), "it allows write"},
		"allows all, and so does the spec":  {native(allow), profile(specs.ActAllow), ""},
		"all, of all programs":              {bpf(allow), profile(specs.ActAllow), "x32"},
		"denies all":                        {bpf(deny), profile(specs.ActErrno), ""},
		"one call":                          {only(number, allow), personality(nil), ""},
		"another call":                      {only(unix.SYS_PTRACE, allow), personality(nil), "it allows ptrace (x86_64"},
		"a call that nobody knows":          {only(4711, allow), personality(nil), "it allows system call 4711"},
		"of x32 programs":                   {bpf(loads(wordArch), instruction{equal, 1, 0, unix.AUDIT_ARCH_X86_64}, deny, loads(wordNumber), instruction{equal, 1, 0, number | x32}, deny, allow), personality(nil), "x32"},
		"logged, and allowed":               {only(number, instruction{answer, 0, 0, 0x7ffc0000}), personality(nil), ""},
		"traced, and denied":                {only(unix.SYS_PTRACE, instruction{answer, 0, 0, 0x7ff00000}), personality(nil), "it allows ptrace"},
		"traced, and allowed":               {only(number, instruction{answer, 0, 0, 0x7ff00000}), personality(nil), ""},
		"an action that nobody knows":       {only(unix.SYS_PTRACE, instruction{answer, 0, 0, 0x12340000}), personality(nil), ""},
		"one argument":                      {only(number, loads(arg(0)), instruction{equal, 0, 1, 8}, allow, deny), personality(is(8, specs.OpEqualTo, 0)), "it allows personality"}, // its upper word is not looked at
		"one argument, both words":          {only(number, loads(arg(0)+1), instruction{equal, 0, 3, 0}, loads(arg(0)), instruction{equal, 0, 1, 8}, allow, deny), personality(is(8, specs.OpEqualTo, 0)), ""},
		"another argument":                  {only(number, loads(arg(1)+1), instruction{equal, 0, 3, 0}, loads(arg(1)), instruction{equal, 0, 1, 8}, allow, deny), personality(is(8, specs.OpEqualTo, 0)), "it allows personality"},
		"an argument too many":              {only(number, loads(arg(0)+1), instruction{equal, 0, 4, 0}, loads(arg(0)), instruction{equal, 1, 0, 8}, instruction{equal, 0, 1, 4242}, allow, deny), personality(is(8, specs.OpEqualTo, 0)), "from 0x1092"},
		"below, and one too many":           {only(number, loads(arg(0)+1), instruction{equal, 0, 3, 0}, loads(arg(0)), instruction{above, 1, 0, 14}, allow, deny), personality(is(14, specs.OpLessThan, 0)), "from 0xe"},
		"below":                             {only(number, loads(arg(0)+1), instruction{equal, 0, 3, 0}, loads(arg(0)), instruction{atMin, 1, 0, 14}, allow, deny), personality(is(14, specs.OpLessThan, 0)), ""},
		"flags that are not set":            {only(number, loads(arg(0)), instruction{and, 0, 0, 0x7e020000}, instruction{equal, 0, 1, 0}, allow, deny), personality(is(0x7e020000, specs.OpMaskedEqual, 0)), ""},
		"the same by another instruction":   {only(number, loads(arg(0)), instruction{common, 1, 0, 0x7e020000}, allow, deny), personality(is(0x7e020000, specs.OpMaskedEqual, 0)), ""},
		"a flag too many":                   {only(number, loads(arg(0)), instruction{and, 0, 0, 0x7e000000}, instruction{equal, 0, 1, 0}, allow, deny), personality(is(0x7e020000, specs.OpMaskedEqual, 0)), "cannot be compared"},
		"one value with a flag":             {only(number, loads(arg(0)), instruction{equal, 3, 0, 0x10020000}, instruction{common, 1, 0, 0x7e020000}, allow, deny, allow), personality(is(0x7e020000, specs.OpMaskedEqual, 0)), "it allows personality"},
		"values of which few have a flag":   {only(number, loads(arg(0)), instruction{above, 0, 2, 0x0001fff0}, instruction{above, 1, 0, 0x00020010}, allow, deny), personality(is(0x7e020000, specs.OpMaskedEqual, 0)), "it allows personality"},
		"denies one, and the spec another":  {native(instruction{equal, 0, 1, unix.SYS_PTRACE}, deny, allow), profile(specs.ActAllow, rule(specs.ActErrno, nil, "mount")), "it allows mount"},
		"denies that one":                   {native(instruction{equal, 0, 1, unix.SYS_MOUNT}, deny, allow), profile(specs.ActAllow, rule(specs.ActErrno, nil, "mount")), ""},
		"denies it with an argument":        {native(instruction{equal, 0, 2, unix.SYS_MOUNT}, loads(arg(0)), instruction{equal, 1, 0, 5}, allow, deny), profile(specs.ActAllow, rule(specs.ActErrno, is(5, specs.OpEqualTo, 0), "mount")), ""},
		"two conditions for one argument":   {only(number, loads(arg(0)+1), instruction{equal, 0, 4, 0}, loads(arg(0)), instruction{equal, 1, 0, 8}, instruction{equal, 0, 1, 9}, allow, deny), personality(append(is(8, specs.OpEqualTo, 0), is(9, specs.OpEqualTo, 0)...)), ""},
		"the instruction pointer":           {bpf(loads(2), instruction{equal, 0, 1, 0}, allow, deny), personality(nil), "loads word 2"},
		"arithmetic":                        {bpf(loads(0), instruction{unix.BPF_ALU | unix.BPF_ADD | unix.BPF_K, 0, 0, 1}, deny), personality(nil), "code 0x4"},
		"out of itself":                     {bpf(instruction{jump, 0, 0, 7}, deny), personality(nil), "leads out of it"},
		"without an end":                    {bpf(loads(0)), personality(nil), "leads out of it"},
		"nothing":                           {nil, personality(nil), "cannot be compared"},
		"half an instruction":               {bpf(deny)[:5], personality(nil), "cannot be compared"},
		"more than the kernel takes":        {bpf(slices.Repeat([]instruction{deny}, maxInstructions+1)...), personality(nil), "cannot be compared"},
		"a range of what it has masked":     {only(number, loads(arg(0)), instruction{and, 0, 0, 0xff}, instruction{above, 0, 1, 3}, allow, deny), personality(nil), "masked"},
		"an unknown action in the profile":  {bpf(deny), profile("SCMP_ACT_DREAM"), "unknown action"},
		"a condition on a seventh argument": {bpf(deny), personality([]specs.LinuxSeccompArg{{Index: 6, Op: specs.OpEqualTo}}), "argument 6"},
	} {
		t.Run(name, func(t *testing.T) {
			err := judge(c.program, c.profile)
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
}

// A profile for all architectures has the calls of i386 programs that are made by socketcall.
func TestMultiplexed(t *testing.T) {
	profile := &specs.LinuxSeccomp{DefaultAction: specs.ActErrno, Architectures: []specs.Arch{specs.ArchX86}, Syscalls: []specs.LinuxSyscall{{Names: []string{"connect"}, Action: specs.ActAllow}}}
	by := func(call uint32) []byte {
		return bpf(loads(wordArch), instruction{equal, 1, 0, unix.AUDIT_ARCH_I386}, deny, loads(wordNumber), instruction{equal, 1, 0, 102}, deny, loads(arg(0)), instruction{equal, 0, 1, call}, allow, deny)
	}
	if err := judge(by(3), profile); err != nil {
		t.Error(err)
	}
	if err := judge(by(2), profile); err == nil {
		t.Error("bind is let through")
	}
}

func BenchmarkWithin(b *testing.B) {
	profile, program := containerds(b)
	for b.Loop() {
		if err := judge(program, profile); err != nil {
			b.Fatal(err)
		}
	}
}

// No program makes the judge loop, or take what the kernel refuses.
func FuzzWithin(f *testing.F) {
	profile, program := containerds(f)
	f.Add(program[:800])
	f.Add(bpf(loads(0), instruction{equal, 0, 1, 1}, allow, deny))
	f.Fuzz(func(t *testing.T, program []byte) {
		p, err := Parse(program)
		if err != nil {
			return
		}
		if p.Within(profile) != nil {
			return
		}
		// What is taken denies a call that the profile does not have, whatever its arguments.
		for _, fill := range []uint32{0, 1, 0xffffffff, 0x7e020000} {
			var c call
			for i := range c {
				c[i] = fill
			}
			c[wordNumber], c[wordArch] = unix.SYS_KEXEC_LOAD, unix.AUDIT_ARCH_X86_64
			if p.run(&c) != denied {
				t.Errorf("it allows kexec_load with %#x", fill)
			}
		}
	})
}
