// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package denied

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

func TestDeny(t *testing.T) {
	dumpWith := func(mode criucore.SeccompMode) *criu.Dump {
		return &criu.Dump{Tasks: []criu.Task{{Threads: []*criucore.ThreadCoreEntry{{SeccompMode: &mode}}}}}
	}
	filtered, bare := dumpWith(criucore.SeccompMode_filter), dumpWith(criucore.SeccompMode_disabled)
	profile := func(names ...string) *specs.LinuxSeccomp {
		return &specs.LinuxSeccomp{DefaultAction: specs.ActErrno, Syscalls: []specs.LinuxSyscall{{Names: names, Action: specs.ActAllow}}}
	}
	for name, test := range map[string]struct {
		seccomp    *specs.LinuxSeccomp
		annotation string
		dump       *criu.Dump
		rule, none bool // has the rule in the end; has no profile
	}{
		"no profile":                       {rule: true},
		"a profile":                        {seccomp: profile("read"), rule: true},
		"a profile that names it":          {seccomp: profile("read", setup)},
		"allowed":                          {annotation: "allow", none: true},
		"allowed, with a profile":          {seccomp: profile("read"), annotation: "allow"},
		"denied":                           {annotation: "deny", rule: true},
		"restored with filters":            {dump: filtered, rule: true},
		"restored without":                 {dump: bare, none: true},
		"restored without, into a profile": {seccomp: profile("read"), dump: bare, rule: true},
	} {
		t.Run(name, func(t *testing.T) {
			var view config.View
			if test.annotation != "" {
				view.Annotations = map[string]string{annotations.IOUring: test.annotation}
			}
			spec := &specs.Spec{Linux: &specs.Linux{Seccomp: test.seccomp}}
			for range 2 { // the second time it is there
				if err := Deny(spec, view, test.dump); err != nil {
					t.Fatal(err)
				}
			}
			got := spec.Linux.Seccomp
			if (got == nil) != test.none {
				t.Fatalf("the profile is %+v", got)
			}
			rules := 0
			if got != nil {
				for _, s := range got.Syscalls {
					if slices.Contains(s.Names, setup) && s.Action == specs.ActErrno && *s.ErrnoRet == 38 {
						rules++
					}
				}
				if test.seccomp == nil && got.DefaultAction != specs.ActAllow {
					t.Errorf("the profile denies more: %+v", got)
				}
			}
			if rules > 1 || (rules == 1) != test.rule {
				t.Errorf("%d rules in %+v", rules, got)
			}
		})
	}
	view := config.View{Annotations: map[string]string{annotations.IOUring: "yes"}}
	if err := Deny(&specs.Spec{Linux: &specs.Linux{}}, view, nil); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("another word: %v", err)
	}
}

// MPTCP gets its own answer, whatever allows socket; no profile allows a call that it did not allow.
func TestDenyMPTCP(t *testing.T) {
	allow := func(args []specs.LinuxSeccompArg, names ...string) specs.LinuxSyscall {
		return specs.LinuxSyscall{Names: names, Action: specs.ActAllow, Args: args}
	}
	family := []specs.LinuxSeccompArg{{Index: 0, Value: unix.AF_VSOCK, Op: specs.OpNotEqual}}
	other := specs.LinuxSeccompArg{Index: protocol, Value: 262, Op: specs.OpNotEqual}
	for name, test := range map[string]struct{ rules, want []specs.LinuxSyscall }{
		"by name":        {[]specs.LinuxSyscall{allow(nil, "read", "socket", "write")}, []specs.LinuxSyscall{allow(nil, "read", "write"), allow([]specs.LinuxSeccompArg{other}, "socket")}},
		"by family":      {[]specs.LinuxSyscall{allow(family, "socket")}, []specs.LinuxSyscall{allow([]specs.LinuxSeccompArg{family[0], other}, "socket")}},
		"of other calls": {[]specs.LinuxSyscall{allow(nil, "read")}, []specs.LinuxSyscall{allow(nil, "read")}},
	} {
		t.Run(name, func(t *testing.T) {
			spec := &specs.Spec{Linux: &specs.Linux{Seccomp: &specs.LinuxSeccomp{DefaultAction: specs.ActErrno, Syscalls: slices.Clone(test.rules)}}}
			for range 2 { // the second time it is there
				if err := Deny(spec, config.View{}, nil); err != nil {
					t.Fatal(err)
				}
			}
			got := slices.DeleteFunc(spec.Linux.Seccomp.Syscalls, func(s specs.LinuxSyscall) bool { return s.Names[0] == setup || s.Names[0] == landlock[0] })
			last := got[len(got)-1]
			if last.Names[0] != "socket" || last.Action != specs.ActErrno || *last.ErrnoRet != uint(unix.EPROTONOSUPPORT) || last.Args[0].Value != 262 {
				t.Errorf("the last rule is %+v", last)
			}
			if !reflect.DeepEqual(got[:len(got)-1], test.want) {
				t.Errorf("the others are %+v, want %+v", got, test.want)
			}
		})
	}
	own := []specs.LinuxSyscall{allow([]specs.LinuxSeccompArg{other}, "socket")}
	spec := &specs.Spec{Linux: &specs.Linux{Seccomp: &specs.LinuxSeccomp{DefaultAction: specs.ActErrno, Syscalls: own}}}
	if err := Deny(spec, config.View{}, nil); err != nil || !reflect.DeepEqual(spec.Linux.Seccomp.Syscalls[:1], own) {
		t.Errorf("a profile about protocols becomes %+v, %v", spec.Linux.Seccomp, err)
	}
}

// Landlock's calls get their own answer, also where a profile allows them among others, and a restored
// container's profile stays as it is.
func TestDenyLandlock(t *testing.T) {
	profile := func() *specs.Spec {
		return &specs.Spec{Linux: &specs.Linux{Seccomp: &specs.LinuxSeccomp{DefaultAction: specs.ActErrno, Syscalls: []specs.LinuxSyscall{
			{Names: []string{"read", "landlock_add_rule", "landlock_create_ruleset"}, Action: specs.ActAllow},
			{Names: []string{"landlock_restrict_self"}, Action: specs.ActAllow},
		}}}}
	}
	spec := profile()
	for range 2 {
		if err := Deny(spec, config.View{}, nil); err != nil {
			t.Fatal(err)
		}
	}
	answers := make(map[string][]uint)
	for _, s := range spec.Linux.Seccomp.Syscalls {
		for _, name := range s.Names {
			if s.Action == specs.ActErrno {
				answers[name] = append(answers[name], *s.ErrnoRet)
			} else {
				answers[name] = append(answers[name], 0)
			}
		}
	}
	for name, want := range map[string]uint{"read": 0, "landlock_create_ruleset": 38, "landlock_add_rule": 38, "landlock_restrict_self": 38} {
		if !slices.Equal(answers[name], []uint{want}) {
			t.Errorf("%s is answered %v, want %d", name, answers[name], want)
		}
	}
	restored, want := profile(), profile().Linux.Seccomp.Syscalls
	if err := Deny(restored, config.View{}, &criu.Dump{}); err != nil || !reflect.DeepEqual(restored.Linux.Seccomp.Syscalls[:2], want) {
		t.Errorf("restored: %+v, %v", restored.Linux.Seccomp.Syscalls, err)
	}
}

func TestRefuseMPTCP(t *testing.T) {
	self := func() ([]int, error) { return []int{os.Getpid()}, nil }
	if err := Refuse(self); err != nil {
		t.Fatal(err)
	}
	s, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
	if err != nil {
		t.Skipf("this kernel has no MPTCP: %v", err)
	}
	defer unix.Close(s)
	if err := Refuse(self); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "GODEBUG=multipathtcp=0") {
		t.Errorf("with an MPTCP socket: %v", err)
	}
}

// Kernel TLS of a connection is refused. Where the kernel has none, the test says what the socket has.
func TestRefuseKernelTLS(t *testing.T) {
	self := func() ([]int, error) { return []int{os.Getpid()}, nil }
	var own net.ListenConfig
	own.SetMultipathTCP(false)
	l, err := own.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := Refuse(self); err != nil {
		t.Fatalf("without: %v", err)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var serr error
	if err := raw.Control(func(fd uintptr) { serr = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_ULP, "tls") }); err != nil {
		t.Fatal(err)
	}
	if serr != nil {
		t.Logf("this kernel has no TLS: %v", serr)
		was := readString
		defer func() { readString = was }()
		readString = func(s, level, number int) (string, error) {
			if _, err := unix.Getpeername(s); err != nil || level != unix.IPPROTO_TCP || number != unix.TCP_ULP {
				return was(s, level, number)
			}
			return "tls", nil
		}
	}
	if err := Refuse(self); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "with tls in the kernel") {
		t.Errorf("with it: %v", err)
	}
}

const endsFirst = "GPUCKPT_TEST_ENDS_FIRST"

// init ends the first thread of a program of TestRefuseEnded, in which it runs.
func init() {
	if os.Getenv(endsFirst) != "" {
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
	}
}

// A process whose first thread has ended is refused while others run on, and not when it has ended.
func TestRefuseEnded(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), endsFirst+"=1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	list := func() ([]int, error) { return []int{cmd.Process.Pid}, nil }
	var err error
	refused := func() bool { // one that is just ending may have no open files any more, unlike the others
		return errdefs.IsFailedPrecondition(err) && strings.Contains(err.Error(), "the first thread of process")
	}
	for end := time.Now().Add(10 * time.Second); !refused() && time.Now().Before(end); time.Sleep(time.Millisecond) {
		err = Refuse(list)
	}
	if !refused() {
		t.Errorf("the first thread has ended: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err := Refuse(list); err != nil {
		t.Errorf("the process has ended: %v", err)
	}
}

// A thread that ends, or that SIGKILL ends, is none that runs on.
func TestGoesOn(t *testing.T) {
	for _, test := range []struct {
		flags, pending string
		want           bool
	}{
		{"4194304", "0000000000000000", true}, {"4194304", "0000000000000200", true},
		{"4194308", "0000000000000000", false}, {"4194304", "0000000000000100", false},
	} {
		if got := goesOn(test.flags, proc.Status("SigPnd:\t"+test.pending+"\nShdPnd:\t0000000000000000\n")); got != test.want {
			t.Errorf("%+v: %v", test, got)
		}
	}
}
