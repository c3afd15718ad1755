// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/node/freeport"
)

// The tests in soft_*_test.go run the real helper against real processes on the
// software GPU (../integration/softcuda). They need a C compiler and root, and
// fail without.

// softDir is where they are built; TestMain makes and removes it.
var softDir string

// buildSoft builds the software GPU, the workload and the helper, once.
var buildSoft = sync.OnceValue(func() error {
	for _, args := range [][]string{
		{"make", "-s", "-C", "../integration/softcuda", "OUT=" + softDir, "all"},
		{"make", "-s", "-C", "../integration/workload", "OUT=" + softDir, "all"},
		{"go", "build", "-o", filepath.Join(softDir, HelperName), "../cmd/" + HelperName},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s (a C compiler, make and Go are needed): %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return nil
})

// soft gives the directory with the software GPU, the workload and the helper.
func soft(t *testing.T) string {
	t.Helper()
	if err := buildSoft(); err != nil {
		t.Fatal(err)
	}
	return softDir
}

// devices makes a directory with the device files of n software GPUs.
func devices(t *testing.T, n int) string {
	t.Helper()
	dir := t.TempDir()
	names := []string{"nvidiactl"}
	for i := range n {
		names = append(names, "nvidia"+strconv.Itoa(i))
	}
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// softHelper starts the real helper on a machine with these device files.
func softHelper(t *testing.T, dev string, more func(*Options)) *Helper {
	t.Helper()
	dir := soft(t)
	o := Options{
		Path:        filepath.Join(dir, HelperName),
		Env:         []string{"LD_LIBRARY_PATH=" + dir, "SOFTCUDA_DEV=" + dev},
		CallTimeout: time.Minute,
	}
	if more != nil {
		more(&o)
	}
	h, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

// work is a running gpuwork.
type work struct {
	t    *testing.T
	pid  int
	port int
}

// start runs gpuwork on a machine with these device files. What it does is in
// args; env is more environment.
func start(t *testing.T, dev string, env []string, args ...string) *work {
	t.Helper()
	dir := soft(t)
	w := &work{t: t, port: freePort(t)}
	cmd := exec.Command(filepath.Join(dir, "gpuwork"), append(args, "--port", strconv.Itoa(w.port))...)
	cmd.Env = append(os.Environ(), append(env, "LD_LIBRARY_PATH="+dir, "SOFTCUDA_DEV="+dev)...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.pid = cmd.Process.Pid
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return w
}

// freePort returns a port for a workload, whose next one is free too.
func freePort(t *testing.T) int {
	t.Helper()
	port, err := freeport.Row(2)
	do(t, err)
	return port
}

// ask sends a request to the workload and gives its reply.
func (w *work) ask(request string) string {
	w.t.Helper()
	c, err := net.Dial("udp", "127.0.0.1:"+strconv.Itoa(w.port))
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, 2048)
	for range 600 {
		c.SetDeadline(time.Now().Add(time.Minute))
		_, err := c.Write([]byte(request))
		n := 0
		if err == nil {
			n, err = c.Read(buf)
		}
		if err == nil {
			return strings.TrimSpace(string(buf[:n]))
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			w.t.Fatalf("ask workload %q: %v", request, err)
		}
		time.Sleep(100 * time.Millisecond) // it is not there yet
	}
	w.t.Fatalf("the workload does not listen")
	return ""
}

// counts fails the test unless the workload's next count is this.
func (w *work) counts(want int) {
	w.t.Helper()
	if got := w.ask("next"); got != strconv.Itoa(want) {
		w.t.Fatalf("the workload counts %s, want %d", got, want)
	}
}

// is fails the test unless the driver says that the process is in the state.
func (w *work) is(h *Helper, want State) {
	w.t.Helper()
	if s, err := h.State(w.t.Context(), w.pid); err != nil || s != want {
		w.t.Fatalf("process %d is %v, %v, want %v", w.pid, s, err, want)
	}
}

// stop stops a workload, and waits until all of its threads stand: the signal alone leaves the driver's
// thread time for a step.
func (w *work) stop() {
	w.t.Helper()
	do(w.t, syscall.Kill(w.pid, syscall.SIGSTOP))
	for end := time.Now().Add(time.Minute); !w.stands(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("process %d does not stop", w.pid)
		}
	}
}

func (w *work) stands() bool {
	w.t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", w.pid))
	do(w.t, err)
	for _, thread := range threads {
		if status, err := os.ReadFile(thread); err == nil && !strings.Contains(string(status), "\nState:\tT") {
			return false
		}
	}
	return len(threads) > 0
}

// contained runs gpuwork as pid 1 of new mount and pid namespaces whose /dev
// has only the device files named.
func contained(t *testing.T, files string, args ...string) *work {
	t.Helper()
	dir := soft(t)
	w := &work{t: t, port: freePort(t)}
	script := `mount -t tmpfs none /dev && for f in ` + files + `; do : >/dev/$f; done && exec "$@"`
	cmd := exec.Command("unshare", append([]string{"--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--",
		"sh", "-c", script, "sh", filepath.Join(dir, "gpuwork")}, append(args, "--port", strconv.Itoa(w.port))...)...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+dir)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	w.ask("next") // runs
	children := childrenOf(t, cmd.Process.Pid)
	if len(children) != 1 {
		t.Fatalf("unshare has children %v", children)
	}
	w.pid = children[0]
	return w
}

// childrenOf gives the children of a process.
func childrenOf(t *testing.T, pid int) []int {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	var children []int
	for _, task := range tasks {
		f, err := os.Open(task)
		if err != nil {
			t.Fatal(err)
		}
		words := bufio.NewScanner(io.LimitReader(f, 1<<16))
		words.Split(bufio.ScanWords)
		for words.Scan() {
			child, err := strconv.Atoi(words.Text())
			if err != nil {
				t.Fatal(err)
			}
			children = append(children, child)
		}
		f.Close()
	}
	return children
}
