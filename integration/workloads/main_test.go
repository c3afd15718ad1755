// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package workloads tests the main job on the programs that people run: PyTorch,
// in containers that an unmodified ctr checkpoints, and restores after their end.
//
// The containers are made of the host's Python and PyTorch: an image of a few
// small files, with the host's directories mounted into it. PyTorch needs a real
// GPU; on the software GPU only Python itself is tested, and the tests of PyTorch
// are skipped. GPUCKPT_PYTHON names the Python to use.
package workloads

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/workloads/hostroot"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

var (
	shared  *harness.Containerd
	gpu     harness.GPU
	results *harness.Results
	// host is the host's Python, nil when there is none that will do; why says
	// what it lacks.
	host *hostroot.Python
	why  error
	// atEnd has a function called when all tests have ended.
	atEnd func(func() error)
)

func TestMain(m *testing.M) {
	harness.Main(m.Run, func(s *harness.Session) (err error) {
		gpu, results, atEnd = s.GPU, s.Results, s.AtEnd
		findRoom()
		if err := readSteps(); err != nil {
			return err
		}
		if gpu.Kind != harness.RealGPU {
			fmt.Println("NOT TESTED HERE: PyTorch. It needs a real GPU; its tests are skipped.")
		}
		if python, err := s.Bins.Path("python3-zmq"); err == nil && os.Getenv(hostroot.EnvPython) == "" {
			os.Setenv(hostroot.EnvPython, python) // the distribution's, with modules from its packages
		}
		if host, why = hostroot.FindPython(s.Context(), gpu.Kind == harness.RealGPU); why != nil {
			fmt.Printf("NOT TESTED HERE: %v\n", why)
			if os.Getenv(hostroot.EnvPython) != "" {
				return fmt.Errorf("%s names a Python that will not do", hostroot.EnvPython)
			}
		} else {
			fmt.Printf("Python: %s, %v\n", host.Executable, host.Versions)
			maps.Copy(results.Versions, host.Versions)
		}
		shared, err = s.Start(harness.Options{})
		return err
	})
}

// needsPython skips a test where there is no Python.
func needsPython(t *testing.T) {
	t.Helper()
	if host == nil {
		t.Skip(why)
	}
}

// needsPyTorch skips a test where there is no PyTorch or no GPU for it.
func needsPyTorch(t *testing.T) {
	t.Helper()
	needsPython(t)
	if gpu.Kind != harness.RealGPU {
		t.Skip("PyTorch needs a real GPU")
	}
}

// patience bounds each wait. To load PyTorch from a cold disk takes a minute.
const patience = 5 * time.Minute

// within waits until something is so. The container's output goes with the error.
func within(t *testing.T, k *harness.Container, what string, so func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	await(ctx, t, k, what, so)
}

// await is within until the context ends.
func await(ctx context.Context, t *testing.T, k *harness.Container, what string, so func() bool) {
	t.Helper()
	looked := false
	for began := time.Now(); !so(); time.Sleep(50 * time.Millisecond) {
		if !looked && time.Since(began) > time.Minute {
			looked = true
			t.Logf("%s: not within a minute; its threads, where they are:\n%s", what, threadsOf(t, k))
		}
		if ctx.Err() != nil {
			t.Fatalf("%s: not within %v; it wrote:\n%s", what, time.Since(began).Round(time.Second), words(k.Logs()))
		}
		status, err := k.Status(t.Context())
		if err != nil || status != "running" {
			t.Fatalf("%s: the container is %q, error %v; it wrote:\n%s", what, status, err, words(k.Logs()))
		}
	}
}

// threadsOf says where the threads of a container's first process and its children are: their names, calls, and
// what the kernel does for them.
func threadsOf(t *testing.T, k *harness.Container) string {
	t.Helper()
	pid, err := k.Pid(t.Context())
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, pid := range append([]int{pid}, proc.Children(pid)...) {
		tids, _ := proc.Threads(pid)
		for _, tid := range tids {
			fmt.Fprintf(&b, "%d %d:", pid, tid)
			for _, file := range []string{"comm", "syscall", "wchan"} {
				text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/%s", pid, tid, file))
				fmt.Fprintf(&b, " %s", bytes.TrimSpace(text))
			}
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// words is what a workload wrote beside its steps: the beginning, which has the first cause, and the end.
func words(text string) string {
	lines := slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool { return strings.HasPrefix(line, "step ") })
	text = strings.Join(lines, "\n")
	if len(text) > 8192 {
		text = text[:4096] + "\n...\n" + tail(text)
	}
	return text
}

// tail is the end of a text, some 4 KiB.
func tail(text string) string { return text[max(0, len(text)-4096):] }
