// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/freeport"
)

// softDir is where the software GPU is built.
var softDir string

func TestMain(m *testing.M) {
	if steer.IsTracer() {
		steer.Main()
	}
	if staging.IsDigester() {
		staging.DigesterMain()
	}
	dir, err := os.MkdirTemp("", "gpuckpt-gpustate-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	softDir = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// buildSoft builds the software GPU, the workload and the helper, once.
var buildSoft = sync.OnceValue(func() error {
	for _, args := range [][]string{
		{"make", "-s", "-C", "../../../integration/softcuda", "OUT=" + softDir, "all"},
		{"make", "-s", "-C", "../../../integration/workload", "OUT=" + softDir, "all"},
		{"make", "-s", "-C", "../../../interposer", "OUT=" + softDir},
		{"go", "build", "-o", filepath.Join(softDir, cuda.HelperName), "../../../cmd/" + cuda.HelperName},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s (a C compiler, make and Go are needed): %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return nil
})

// work is a process that uses a software GPU, as a Target: a container without a
// cgroup. It is never frozen, so threads that are not held run on.
type work struct {
	t    *testing.T
	pid  int
	conn net.Conn
}

// startWork starts a process whose GPU memory has a pattern of so many bytes.
func startWork(t *testing.T, bytes string, environment ...string) *work {
	t.Helper()
	if err := buildSoft(); err != nil {
		t.Fatal(err)
	}
	dev := t.TempDir()
	for _, name := range []string{"nvidiactl", "nvidia0"} {
		if err := os.WriteFile(filepath.Join(dev, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("LD_LIBRARY_PATH", softDir) // the helper's as well
	t.Setenv("PATH", softDir+":"+os.Getenv("PATH"))
	t.Setenv("SOFTCUDA_DEV", dev)
	free, err := freeport.Row(1)
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(free)
	at := "127.0.0.1:" + port
	cmd := exec.Command(filepath.Join(softDir, "gpuwork"), "pattern", "--bytes", bytes, "--port", port)
	cmd.Stderr, cmd.Env = os.Stderr, append(os.Environ(), environment...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	w := &work{t: t, pid: cmd.Process.Pid}
	if w.conn, err = net.Dial("udp", at); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.conn.Close() })
	w.verify()
	return w
}

// verify fails the test unless the GPU memory has its pattern.
func (w *work) verify() {
	w.t.Helper()
	buf := make([]byte, 2048)
	for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(10 * time.Millisecond) {
		w.conn.SetDeadline(time.Now().Add(10 * time.Second))
		n := 0
		_, err := w.conn.Write([]byte("verify"))
		if err == nil {
			n, err = w.conn.Read(buf)
		}
		if err != nil {
			continue // it is not there yet
		}
		if answer := string(buf[:n]); !strings.Contains(answer, "bad=0") {
			w.t.Fatalf("the process answers %q", answer)
		}
		return
	}
	w.t.Fatal("the process does not answer")
}

func (w *work) Init() int                   { return w.pid }
func (w *work) Cgroup() (Cgroup, error)     { return w, nil }
func (w *work) CloseExecs() (reopen func()) { return func() {} }
func (w *work) RefuseStartingExecs() error  { return nil }
func (w *work) Pids() ([]int, error)        { return []int{w.pid}, nil }
func (w *work) Freeze() error               { return nil }
func (w *work) Thaw() error                 { return nil }
func (w *work) Loosen() error               { return nil }
func (w *work) ThawIfKilled(int) error      { return nil }

// runPlain starts a program whose parent waits for it.
func runPlain(cmd *exec.Cmd) (wait func() (int, error), err error) {
	return func() (int, error) { return 0, cmd.Wait() }, cmd.Start()
}

// options are those of a node without a staging cgroup, and of a container with all GPUs.
func (w *work) options() Options {
	node := config.Default()
	node.Staging.Cgroup = ""
	return Options{Config: node, Request: cdi.Request{AllNodes: true}}
}

// lock locks the process by a State of its own.
func (w *work) lock() *State {
	w.t.Helper()
	s := New(w, runPlain)
	w.t.Cleanup(s.Forget)
	candidates, err := s.Candidates()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := s.Lock(w.t.Context(), candidates, w.options()); err != nil || s.Phase() != Locked {
		w.t.Fatalf("the state is %v: %v", s.Phase(), err)
	}
	return s
}

// memory returns how many of these bytes of the process are not zero.
func (w *work) memory(start, bytes uint64) (data int) {
	w.t.Helper()
	f, err := os.Open("/proc/" + strconv.Itoa(w.pid) + "/mem")
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	buf := make([]byte, bytes)
	if _, err := f.ReadAt(buf, int64(start)); err != nil {
		w.t.Fatal(err)
	}
	for _, b := range buf {
		if b != 0 {
			data++
		}
	}
	return data
}
