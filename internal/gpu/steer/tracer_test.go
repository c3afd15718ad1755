// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// spinEnv names the file a test process counts in: see spin.
const spinEnv = "GPUCKPT_TEST_SPIN"

func TestMain(m *testing.M) {
	if IsTracer() {
		wanderAsTold()
		serve(asTold())
	}
	if staging.IsDigester() {
		staging.DigesterMain()
	}
	if os.Getenv(targetEnv) != "" {
		beTarget()
	}
	if path := os.Getenv(spinEnv); path != "" {
		spin(path)
	}
	os.Exit(m.Run())
}

// spin counts in shared memory, one counter for each of three threads, for
// ever. The third thread's id is written beside its counter.
func spin(path string) {
	runtime.GOMAXPROCS(4)
	mem := shared(path)
	for i := range 3 {
		go func() {
			runtime.LockOSThread()
			atomic.StoreUint64(&mem[8+i], uint64(unix.Gettid()))
			for {
				atomic.AddUint64(&mem[i], 1)
			}
		}()
	}
	select {}
}

// shared maps 16 numbers of a file.
func shared(path string) *[16]uint64 {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		panic(err)
	}
	defer f.Close()
	if err := f.Truncate(int64(binary.Size([16]uint64{}))); err != nil {
		panic(err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, 128, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	return (*[16]uint64)(unsafe.Pointer(&mem[0]))
}

// spinner starts the counting process and waits until all its threads count.
func spinner(t *testing.T) (*exec.Cmd, *[16]uint64) {
	t.Helper()
	return spinnerAs(t, nil)
}

// spinnerAs is spinner with attributes for the process.
func spinnerAs(t *testing.T, attributes *syscall.SysProcAttr) (*exec.Cmd, *[16]uint64) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "counters")
	mem := shared(path)
	cmd := exec.Command("/proc/self/exe")
	// Preempted, a thread of Go's would wait for another one, which is held.
	cmd.Env = append(os.Environ(), spinEnv+"="+path, "GODEBUG=asyncpreemptoff=1")
	cmd.SysProcAttr = attributes
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	eventually(t, "all threads count", func() bool {
		return atomic.LoadUint64(&mem[0]) > 0 && atomic.LoadUint64(&mem[1]) > 0 && atomic.LoadUint64(&mem[2]) > 0
	})
	return cmd, mem
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// freezer is a cgroup made for one test, of version 1 or 2.
type freezer struct{ file, on, off, procs string }

func newFreezer(t *testing.T) freezer {
	t.Helper()
	var f freezer
	var dir string
	if _, err := os.Stat("/sys/fs/cgroup/freezer"); err == nil {
		dir = fmt.Sprintf("/sys/fs/cgroup/freezer/gpuckpt-trace-test-%d", os.Getpid())
		f = freezer{file: dir + "/freezer.state", on: "FROZEN", off: "THAWED"}
	} else {
		dir = fmt.Sprintf("/sys/fs/cgroup/gpuckpt-trace-test-%d", os.Getpid())
		f = freezer{file: dir + "/cgroup.freeze", on: "1", off: "0"}
	}
	f.procs = dir + "/cgroup.procs"
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatalf("make a cgroup (the tests need root): %v", err)
	}
	t.Cleanup(func() {
		for range 1000 { // its processes end in their own time
			if err := os.Remove(dir); err == nil || errors.Is(err, os.ErrNotExist) {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("cgroup %s stays", dir)
	})
	return f
}

func (f freezer) set(t *testing.T, value string) {
	t.Helper()
	if err := os.WriteFile(f.file, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
	if value != f.on {
		return
	}
	eventually(t, "frozen", func() bool {
		if strings.HasSuffix(f.file, ".freeze") {
			b, err := os.ReadFile(filepath.Join(filepath.Dir(f.file), "cgroup.events"))
			return err == nil && strings.Contains(string(b), "frozen 1")
		}
		b, err := os.ReadFile(f.file)
		return err == nil && strings.TrimSpace(string(b)) == f.on
	})
}

// A held thread executes nothing between freeze and freeze, while the one left
// out runs, and all run on afterwards.
func TestHeldThreadsExecuteNothing(t *testing.T) {
	f := newFreezer(t) // first, so that it is removed last
	cmd, mem := spinner(t)
	if err := os.WriteFile(f.procs, fmt.Append(nil, cmd.Process.Pid), 0); err != nil {
		t.Fatal(err)
	}
	free := int(atomic.LoadUint64(&mem[8+2]))

	f.set(t, f.on)
	frozen := [2]uint64{atomic.LoadUint64(&mem[0]), atomic.LoadUint64(&mem[1])}
	s := session(t)
	if err := s.Hold([]int{cmd.Process.Pid}, []int{free}); err != nil {
		t.Fatal(err)
	}
	before := atomic.LoadUint64(&mem[2])
	f.set(t, f.off)
	eventually(t, "the thread left out runs", func() bool { return atomic.LoadUint64(&mem[2]) > before+1000 })
	f.set(t, f.on)
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	for i, was := range frozen {
		if now := atomic.LoadUint64(&mem[i]); now != was {
			t.Errorf("held thread %d counted from %d to %d", i, was, now)
		}
	}
	f.set(t, f.off)
	for i, was := range frozen {
		eventually(t, "a released thread runs on", func() bool { return atomic.LoadUint64(&mem[i]) > was })
	}
}

// A tracer that is killed lets go of everything, and the holder is told.
func TestKilledTracerLetsGo(t *testing.T) {
	cmd, mem := spinner(t)
	s := session(t)
	if err := s.Hold([]int{cmd.Process.Pid}, nil); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(s.Pid(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		was := atomic.LoadUint64(&mem[i])
		eventually(t, "a thread runs on", func() bool { return atomic.LoadUint64(&mem[i]) > was })
	}
	if err := s.Release(); !errors.Is(err, ErrTracerGone) {
		t.Errorf("release after the tracer's end: got %v, want ErrTracerGone", err)
	}
}

// A container's first process that is killed while its threads are held ends: the
// one that is not held waits in its end for the others, and steps may wait for it.
func TestHeldProcessIsKilled(t *testing.T) {
	cmd, _ := spinnerAs(t, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID})
	pid := cmd.Process.Pid
	tids, err := ptrace.Threads(pid)
	if err != nil {
		t.Fatal(err)
	}
	s := session(t)
	if err := s.Hold([]int{pid}, tids[len(tids)-1:]); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process has ended", func() bool {
		var ended unix.Siginfo
		err := unix.Waitid(unix.P_PID, pid, &ended, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		return err == nil && ended.Signo != 0
	})
	if err := s.Release(); err != nil {
		t.Error(err)
	}
}

// A tracer's first goroutine is on its first thread, however busy it begins: a hold
// that came to be there would never let go, since that thread ends with the process.
func TestFirstThreadIsKeptOut(t *testing.T) {
	if err := os.WriteFile(wanderFile(os.Getpid()), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(wanderFile(os.Getpid()))
	cmd, _ := spinner(t)
	s := session(t)
	if err := s.Hold([]int{cmd.Process.Pid}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(); err != nil {
		t.Error(err)
	}
}

func TestThreadOfAnotherTracerIsNamed(t *testing.T) {
	cmd, mem := spinner(t)
	first, second := session(t), session(t)
	if err := first.Hold([]int{cmd.Process.Pid}, nil); err != nil {
		t.Fatal(err)
	}
	err := second.Hold([]int{cmd.Process.Pid}, nil)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("traced by process %d", first.Pid())) {
		t.Fatalf("second tracer: got %v, want an error that names the first", err)
	}
	if err := first.Release(); err != nil {
		t.Fatal(err)
	}
	// Released means detached: the second can have them at once.
	if err := second.Hold([]int{cmd.Process.Pid}, nil); err != nil {
		t.Fatal(err)
	}
	if err := second.Release(); err != nil {
		t.Fatal(err)
	}
	was := atomic.LoadUint64(&mem[0])
	eventually(t, "the threads run on", func() bool { return atomic.LoadUint64(&mem[0]) > was })
}

func TestEndedProcessHoldsNothing(t *testing.T) {
	cmd := exec.Command("/bin/true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	s := session(t)
	if err := s.Hold([]int{cmd.Process.Pid}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
}

func TestUnknownOrderIsRefused(t *testing.T) {
	s := session(t)
	if _, err := s.call("test", order{Op: "dance"}); err == nil {
		t.Error("a tracer danced")
	}
	if err := s.Release(); err == nil {
		t.Error("a release without a hold went well")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// session starts a tracer that ends with the test.
func session(t *testing.T) *Session {
	t.Helper()
	s, err := Start(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Kill() // one with a race detector takes a second to end by itself
		s.Close()
	})
	return s
}

// digester starts a digester that ends with the test.
func digester(t *testing.T) *staging.Digester {
	t.Helper()
	d, err := staging.StartDigester(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Kill()
		d.Close()
	})
	return d
}

func FuzzParseOrder(f *testing.F) {
	f.Add([]byte(`{"op":"hold","processes":[1,2],"except":[3]}`))
	f.Add([]byte(`{"op":"map","mappings":[{"pid":1,"tid":1,"start":4096,"bytes":4096,"path":"/x","offset":0}]}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		var o order
		if err := worker.Decode(line, &o); err != nil {
			return
		}
		for _, id := range append(o.Processes, o.Except...) {
			if id <= 0 {
				t.Fatalf("accepted %d", id)
			}
		}
		for _, m := range o.Mappings {
			if m.PID <= 0 || m.TID <= 0 || m.Bytes == 0 || (m.Start|m.Bytes|m.Offset)%staging.PageSize != 0 {
				t.Fatalf("accepted %+v", m)
			}
		}
	})
}
