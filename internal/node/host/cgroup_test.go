// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// fakeEnv makes the test's executable a process that "lives", or one whose "first
// thread ended".
const fakeEnv = "GPUCKPT_TEST_FAKE"

func init() {
	if os.Getenv(fakeEnv) != "" {
		runtime.LockOSThread() // TestMain is on the first thread
	}
}

func TestMain(m *testing.M) {
	switch os.Getenv(fakeEnv) {
	case "":
		os.Exit(m.Run())
	case "first thread ended":
		fmt.Println("goes on without")
		unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0) // the thread's, not the process's
	}
	fmt.Println("sleeps")
	time.Sleep(time.Minute)
	os.Exit(0)
}

func startFake(t *testing.T, what string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), fakeEnv+"="+what)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// A process that does not freeze is reported in the end, and holds nobody up for ever.
func TestAsk(t *testing.T) {
	file := filepath.Join(t.TempDir(), "freezer.state")
	if err := ask(file, "FROZEN", file, "FROZEN", time.Minute); err != nil {
		t.Error(err)
	}
	events := filepath.Join(t.TempDir(), "cgroup.events")
	if err := os.WriteFile(events, []byte("populated 1\nfrozen 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ask(file, "1", events, "frozen 1", time.Minute); err != nil {
		t.Error(err)
	}
	if err := ask(file, "0", events, "frozen 0", 10*time.Millisecond); !errdefs.IsUnavailable(err) {
		t.Errorf("got %v", err)
	}
	if err := ask(file, "0", events, "", 10*time.Millisecond); err != nil {
		t.Error(err)
	}
	// It takes what is written, and has nothing to say.
	if err := ask(os.DevNull, "FROZEN", os.DevNull, "FROZEN", 10*time.Millisecond); !errdefs.IsUnavailable(err) {
		t.Errorf("got %v", err)
	}
	if err := ask(filepath.Join(file, "none"), "THAWED", file, "THAWED", time.Minute); err == nil {
		t.Error("no error")
	}
}

// What is left of a killed container does not stay frozen, which nobody would thaw.
func TestThawIfKilled(t *testing.T) {
	if cgroups.Mode() == cgroups.Unified {
		t.Skip("no cgroup v1: who is frozen by version 2 can be killed")
	}
	cg := makeCgroup(t, "/sys/fs/cgroup/freezer")
	dir := cg.Dir()
	for what, killed := range map[string]bool{"lives": false, "first thread ended": true, "killed while frozen": true} {
		cmd := startFake(t, what)
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cg.Thaw()
			_ = cmd.Wait()
		})
		pid := cmd.Process.Pid
		for began := time.Now(); what == "first thread ended" && time.Since(began) < 20*time.Second; time.Sleep(time.Millisecond) {
			if status, _ := proc.StatusOf(pid); status.Ended() {
				break
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, pid), 0); err != nil {
			t.Fatal(err)
		}
		if err := cg.Freeze(); err != nil {
			t.Fatal(err)
		}
		if what == "killed while frozen" {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		err := cg.ThawIfKilled(pid)
		state, rerr := os.ReadFile(filepath.Join(dir, "freezer.state"))
		if rerr != nil {
			t.Fatal(rerr)
		}
		if (err != nil) != killed || (strings.TrimSpace(string(state)) == "THAWED") != killed {
			t.Errorf("%s: %v, the cgroup is %s", what, err, state)
		}
		if err := cg.Thaw(); err != nil {
			t.Fatal(err)
		}
	}
}

// makeCgroup makes a cgroup in another, which is removed with the test, when its processes have ended.
func makeCgroup(t *testing.T, in string) *Cgroup {
	t.Helper()
	dir, err := os.MkdirTemp(in, "gpuckpt-host-test-")
	if err != nil {
		t.Fatal(err)
	}
	cg := &Cgroup{dir: dir}
	if _, err := os.Stat(filepath.Join(dir, "cgroup.freeze")); err == nil {
		cg.v2 = new(cgroup2.Manager)
	}
	t.Cleanup(func() {
		for range 1000 { // its processes end in their own time
			if os.Remove(cg.dir) == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("%s is left", cg.dir)
	})
	return cg
}

// All processes of a frozen cgroup end, those of one below it too, and nobody else. On a machine with
// both versions of cgroups each is tried.
func TestKill(t *testing.T) {
	tried := 0
	for _, root := range []string{"/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified", unifiedRoot} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		tried++
		t.Run(filepath.Base(root), func(t *testing.T) { testKill(t, root) })
	}
	if tried == 0 {
		t.Error("no cgroups are mounted")
	}
}

func testKill(t *testing.T, root string) {
	cg, other := makeCgroup(t, root), makeCgroup(t, root)
	below := makeCgroup(t, cg.Dir()).Dir()
	in := make(map[string]*exec.Cmd)
	for _, dir := range []string{cg.Dir(), below, other.Dir()} {
		in[dir] = startFake(t, "lives")
		t.Cleanup(func() {
			_ = in[dir].Process.Kill()
			_ = in[dir].Wait()
		})
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, in[dir].Process.Pid), 0); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = cg.Thaw() })
	if err := errors.Join(cg.Freeze(), cg.Kill()); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{cg.Dir(), below} {
		_ = in[dir].Wait()
		if status := in[dir].ProcessState.Sys().(syscall.WaitStatus); status.Signal() != unix.SIGKILL {
			t.Errorf("%s: %v", dir, in[dir].ProcessState)
		}
	}
	if err := in[other.Dir()].Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("another cgroup: %v", err)
	}
	if _, err := os.Stat(filepath.Join(cg.Dir(), "cgroup.kill")); err == nil {
		if frozen, err := cg.Frozen(); err != nil || !frozen {
			t.Errorf("frozen %v, %v: they were killed one by one", frozen, err)
		}
	}
}

// A process that is held and not the container's is refused; one that has ended is not.
func TestRefuseForeign(t *testing.T) {
	own, none := os.Getpid(), 1<<30
	pids := func() ([]int, error) { return []int{own}, nil }
	if err := RefuseForeign(pids, []int{own, none}); err != nil {
		t.Error(err)
	}
	if err := RefuseForeign(pids, []int{own, os.Getppid()}); err == nil {
		t.Error("another process is not refused")
	}
}

// A process that has ended and was not waited for is in no cgroup: version 1 shows it in the root,
// with all processes of the machine.
func TestCgroupOfEnded(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		if status, _ := proc.StatusOf(cmd.Process.Pid); status.Ended() {
			break
		}
		if time.Since(began) > 10*time.Second {
			t.Fatal("it does not end")
		}
	}
	cg, err := CgroupOf(cmd.Process.Pid)
	if cgroups.Mode() == cgroups.Unified && err == nil {
		return // which remembers the cgroup of a zombie
	}
	if !errdefs.IsNotFound(err) {
		t.Errorf("cgroup %v, error %v; want that there is none", cg, err)
	}
}

// Who asks for a cgroup, as each step of an operation does, has not all mounts of the node read: on a
// node with many that took a tenth of a plain container's checkpoint.
func TestCgroupOfIsCheap(t *testing.T) {
	if n := testing.AllocsPerRun(10, func() {
		if _, err := cgroupOf(os.Getpid()); err != nil {
			t.Fatal(err)
		}
	}); n > 60 {
		t.Errorf("it takes %v allocations", n)
	}
}

// A cgroup goes with those in it, if nobody is there; and none that is not a container's.
func TestRemoveCgroup(t *testing.T) {
	root := unifiedRoot
	if cgroups.Mode() != cgroups.Unified {
		root = filepath.Join(unifiedRoot, "pids")
	}
	above := fmt.Sprintf("gpuckpt-test-%d", os.Getpid())
	for _, name := range []string{above + "/container", above + ".slice:nerdctl:container"} {
		if err := os.MkdirAll(filepath.Join(root, name, "below"), 0o755); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time there is none
			if err := RemoveCgroup("/" + name); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(filepath.Join(root, name)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is there, %v", name, err)
			}
		}
	}
	if err := os.Remove(filepath.Join(root, above)); err != nil {
		t.Error(err) // the one above stays
	}
	for _, none := range []string{"", "/", "system.slice:cri:x", "/../.."} {
		if err := RemoveCgroup(none); err != nil {
			t.Errorf("%q: %v", none, err)
		}
	}
}

// runc is asked again as long as it could not freeze, and not after any other error.
func TestRetryFreeze(t *testing.T) {
	gone := errors.New("container not running")
	for _, test := range []struct {
		answers []error
		want    error
	}{
		{[]error{nil}, nil},
		{[]error{errors.New("OCI runtime pause failed: unable to freeze"), errors.New("unable to freeze"), nil}, nil},
		{[]error{errors.New("unable to freeze"), gone}, gone},
	} {
		asked := 0
		answer, err := RetryFreeze(1<<30, func() (int, error) { asked++; return asked, test.answers[asked-1] })
		if !errors.Is(err, test.want) || asked != len(test.answers) || answer != asked {
			t.Errorf("%v: asked %d times, answer %d, error %v", test.answers, asked, answer, err)
		}
	}
}
