// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package denied keeps io_uring, MPTCP and Landlock out of containers that may be checkpointed: CRIU
// cannot dump the first two, and loses a Landlock domain without a word, which nobody sees from outside.
// Programs do without where the kernel has none of them, so they are told that it has none. Go asks for
// an MPTCP socket whenever it listens.
package denied

import (
	"fmt"
	"net/netip"
	goruntime "runtime"
	"slices"
	"strconv"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/guard/admission"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const setup = "io_uring_setup"

// landlock are the calls of Landlock.
var landlock = []string{"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"}

// The argument of socket(2) that is the protocol.
const protocol = 2

// Deny has the spec's seccomp profile answer io_uring_setup with ENOSYS, unless the container
// is to have it or the profile has a rule of its own for it; Landlock's calls with ENOSYS; and socket with
// EPROTONOSUPPORT for MPTCP, unless the profile has a rule for protocols. A container without a profile
// gets one with these rules alone. dump is what a restore is made of, nil for a fresh start. The error is
// that of the annotation.
func Deny(spec *specs.Spec, view config.View, dump *criu.Dump) error {
	allowed, err := view.AllowsIOUring()
	if err != nil || allowed || spec.Linux == nil {
		return err
	}
	profile := spec.Linux.Seccomp
	if profile == nil {
		// Processes without a filter cannot be restored into a spec with one.
		if dump != nil && !admission.Filtered(dump) {
			return nil
		}
		profile = &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Architectures: allArchitectures()}
	}
	if dump == nil { // the processes of a dump may have a filter without the rule
		denyMPTCP(profile)
		denyLandlock(profile)
	}
	spec.Linux.Seccomp = profile
	names := func(s specs.LinuxSyscall) bool { return slices.Contains(s.Names, setup) }
	if slices.ContainsFunc(profile.Syscalls, names) {
		return nil
	}
	profile.Syscalls = append(profile.Syscalls, specs.LinuxSyscall{Names: []string{setup}, Action: specs.ActErrno, ErrnoRet: new(uint(unix.ENOSYS))})
	return nil
}

// denyMPTCP adds the rule, and has those that allow socket allow other protocols alone: of rules that
// both fit a call, libseccomp does not say which one counts.
func denyMPTCP(profile *specs.LinuxSeccomp) {
	mptcp := specs.LinuxSeccompArg{Index: protocol, Value: unix.IPPROTO_MPTCP, Op: specs.OpEqualTo}
	other := mptcp
	other.Op = specs.OpNotEqual
	var rules []specs.LinuxSyscall
	for _, rule := range profile.Syscalls {
		about := slices.Contains(rule.Names, "socket")
		if about && (slices.ContainsFunc(rule.Args, func(a specs.LinuxSeccompArg) bool { return a.Index == protocol }) || len(rule.Args) > 1) {
			return // it is about protocols, or runc may make a rule of each argument
		}
		if !about || rule.Action == profile.DefaultAction {
			rules = append(rules, rule)
			continue
		}
		if rest := slices.DeleteFunc(slices.Clone(rule.Names), func(n string) bool { return n == "socket" }); len(rest) > 0 {
			others := rule
			others.Names = rest
			rules = append(rules, others)
		}
		rule.Names, rule.Args = []string{"socket"}, append(slices.Clone(rule.Args), other)
		rules = append(rules, rule)
	}
	profile.Syscalls = append(rules, specs.LinuxSyscall{Names: []string{"socket"}, Action: specs.ActErrno, ErrnoRet: new(uint(unix.EPROTONOSUPPORT)), Args: []specs.LinuxSeccompArg{mptcp}})
}

// denyLandlock adds the rule, and takes the calls out of those that allow them.
func denyLandlock(profile *specs.LinuxSeccomp) {
	rules := slices.Clone(profile.Syscalls)
	for i := range rules {
		rules[i].Names = slices.DeleteFunc(slices.Clone(rules[i].Names), func(n string) bool { return slices.Contains(landlock, n) })
	}
	rules = slices.DeleteFunc(rules, func(r specs.LinuxSyscall) bool { return len(r.Names) == 0 })
	profile.Syscalls = append(rules, specs.LinuxSyscall{Names: slices.Clone(landlock), Action: specs.ActErrno, ErrnoRet: new(uint(unix.ENOSYS))})
}

// allArchitectures returns those whose programs this machine runs: libseccomp kills a process that
// makes a call of an architecture that its filter does not name.
func allArchitectures() []specs.Arch {
	switch goruntime.GOARCH {
	case "amd64":
		return []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32}
	case "arm64":
		return []specs.Arch{specs.ArchAARCH64, specs.ArchARM}
	}
	return nil
}

// Refuse refuses a container with a process that has io_uring open or mapped, an MPTCP socket, a connection to
// itself with kernel TLS, a sealed memfd mapped (proc.MapsSealed), a first thread that has ended, or a thread with files or a
// working directory of its own. list returns its processes; one that has ended is not refused.
func Refuse(list func() ([]int, error)) error {
	pids, err := list()
	if err != nil && !proc.Ended(err) {
		return err
	}
	for _, pid := range pids {
		if err := refuse(pid); err != nil && !proc.Ended(err) {
			return err
		}
	}
	return nil
}

// RefuseEnded refuses a process whose first thread has ended and others run on: runc takes a container with
// such a first process for one that has ended, and CRIU dumps none. One that ends has others for a while, too: the
// kernel first gives its memory back.
func RefuseEnded(pid int) error {
	status, err := proc.StatusOf(pid)
	if err != nil || !status.Ended() || status.Number("Threads") < 2 {
		return nil //nolint:nilerr // it has ended
	}
	goOn := false
	_ = proc.EachStat(func() ([]int, error) { return proc.Threads(pid) }, func(tid int, fields []string) {
		thread, err := proc.ThreadStatus(pid, tid)
		goOn = goOn || err == nil && goesOn(fields[9], thread)
	})
	if !goOn {
		return nil
	}
	return fmt.Errorf("the first thread of process %s has ended (pthread_exit in main) and others run on, which runc and CRIU cannot dump: have it wait for the others: %w",
		proc.Describe(pid), errdefs.ErrFailedPrecondition)
}

// goesOn reports whether a thread neither ends nor is about to, by its flags (proc(5)) and its status.
func goesOn(flags string, status proc.Status) bool {
	const exiting = 4 // PF_EXITING of linux/sched.h
	f, err := strconv.ParseUint(flags, 10, 64)
	return err == nil && f&exiting == 0 && !status.Killed()
}

// readString reads an option of a socket. A test has another.
var readString = unix.GetsockoptString

// inner reports whether both ends of a connection have one address. One to elsewhere comes back closed.
func inner(s int) bool {
	own, err := unix.Getsockname(s)
	peer, perr := unix.Getpeername(s)
	return err == nil && perr == nil && addressOf(own) == addressOf(peer)
}

func addressOf(at unix.Sockaddr) netip.Addr {
	switch at := at.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(at.Addr)
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(at.Addr).Unmap()
	}
	return netip.Addr{}
}

func refuse(pid int) error {
	if err := RefuseEnded(pid); err != nil {
		return err
	}
	const file = "anon_inode:[io_uring]"
	uses, err := proc.HasOpen(pid, file)
	if err == nil && !uses {
		uses, err = proc.HasMapped(pid, file)
	}
	if err != nil {
		return err
	}
	if uses {
		return fmt.Errorf("process %s uses io_uring, which CRIU cannot dump: start the container anew by gpuckpt, without the annotation %s=allow: it has none then; or have the program do without: %w",
			proc.Describe(pid), annotations.IOUring, errdefs.ErrFailedPrecondition)
	}
	mptcp, layer := false, ""
	err = proc.EachSocket(pid, func(_, s, protocol int) bool {
		switch kind, err := unix.GetsockoptInt(s, unix.SOL_SOCKET, unix.SO_TYPE); {
		case err != nil || kind == unix.SOCK_RAW:
		case protocol == unix.IPPROTO_MPTCP:
			mptcp = true
		case protocol == unix.IPPROTO_TCP && layer == "" && inner(s):
			layer, _ = readString(s, unix.IPPROTO_TCP, unix.TCP_ULP) // an error is of a kernel without
		}
		return false
	})
	switch {
	case err != nil:
		return err
	case mptcp:
		return fmt.Errorf("process %s has an MPTCP socket, which CRIU cannot dump: start the container anew by gpuckpt, without the annotation %s=allow: it has none then; or have the program use TCP (GODEBUG=multipathtcp=0 for one in Go): %w",
			proc.Describe(pid), annotations.IOUring, errdefs.ErrFailedPrecondition)
	case layer != "":
		return fmt.Errorf("process %s has a connection within the container with %s in the kernel (TCP_ULP), which CRIU loses: restored, it would go on in the clear: close it before a checkpoint, or have the program encrypt by itself (OpenSSL: without SSL_OP_ENABLE_KTLS): %w",
			proc.Describe(pid), layer, errdefs.ErrFailedPrecondition)
	}
	if sealed, err := proc.MapsSealed(pid); err != nil {
		return err
	} else if sealed {
		return fmt.Errorf("process %s has a memfd mapped shared that is sealed with F_SEAL_WRITE, which CRIU maps before it seals it, and the kernel refuses that: have the program unmap it before a checkpoint, or map it privately: %w",
			proc.Describe(pid), errdefs.ErrFailedPrecondition)
	}
	apart, what, err := proc.ThreadApart(pid)
	if err != nil || apart == 0 {
		return err
	}
	return fmt.Errorf("thread %d of process %s has %s of its own (unshare), which CRIU gives all threads of a process alike: have a process of its own do that work: %w",
		apart, proc.Describe(pid), what, errdefs.ErrFailedPrecondition)
}
