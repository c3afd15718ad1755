// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/freeport"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

// These tests run the built program against processes on the software GPU. They
// need a C compiler and root, and fail without.

// bin is where the programs are built; TestMain makes and removes it.
var bin string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "gpuckpt-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	bin = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

var build = sync.OnceValue(func() error {
	for _, args := range [][]string{
		{"make", "-s", "-C", "../../integration/softcuda", "OUT=" + bin, "all"},
		{"make", "-s", "-C", "../../integration/workload", "OUT=" + bin, "all"},
		{"go", "build", "-o", filepath.Join(bin, "gpuckpt"), "."},
		{"go", "build", "-o", filepath.Join(bin, cuda.HelperName), "../" + cuda.HelperName},
		{"ln", "-s", "gpuckpt", filepath.Join(bin, "cuda-checkpoint")},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s (a C compiler, make and Go are needed): %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return nil
})

// machine is a machine with software GPUs.
type machine struct {
	t   *testing.T
	env []string
}

func newMachine(t *testing.T, gpus int) *machine {
	t.Helper()
	if err := build(); err != nil {
		t.Fatal(err)
	}
	dev := t.TempDir()
	names := []string{"nvidiactl"}
	for i := range gpus {
		names = append(names, "nvidia"+strconv.Itoa(i))
	}
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(dev, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return &machine{t, append(os.Environ(), "LD_LIBRARY_PATH="+bin, "SOFTCUDA_DEV="+dev)}
}

// run runs a built program and gives its outputs and exit status.
func (m *machine) run(args ...string) (stdout, stderr string, exit int) {
	m.t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.Command(filepath.Join(bin, args[0]), args[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = m.env, &out, &errs
	err := cmd.Run()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		m.t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// prints fails the test unless a program succeeds with just this output.
func (m *machine) prints(want string, args ...string) {
	m.t.Helper()
	if out, errs, exit := m.run(args...); exit != 0 || out != want || errs != "" {
		m.t.Fatalf("%q: exit status %d, printed %q and %q, want %q", args, exit, out, errs, want)
	}
}

// start runs gpuwork and gives its pid and what asks it for its next count.
func (m *machine) start(args ...string) (pid string, next func() string) {
	m.t.Helper()
	free, err := freeport.Row(1)
	if err != nil {
		m.t.Fatal(err)
	}
	port := strconv.Itoa(free)
	address := "127.0.0.1:" + port
	cmd := exec.Command(filepath.Join(bin, "gpuwork"), append(args, "--port", port)...)
	cmd.Env, cmd.Stderr = m.env, os.Stderr
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	next = func() string {
		m.t.Helper()
		for range 600 {
			if out, _, exit := m.run("gpuwork", "send", address, "next"); exit == 0 {
				return strings.TrimSpace(out)
			}
			time.Sleep(100 * time.Millisecond) // it does not listen yet
		}
		m.t.Fatal("the workload does not answer")
		return ""
	}
	if got := next(); got != "101" {
		m.t.Fatalf("the workload counts %s", got)
	}
	return strconv.Itoa(cmd.Process.Pid), next
}

func TestCUDACommandsTakeAProcessThereAndBack(t *testing.T) {
	m := newMachine(t, 1)
	pid, next := m.start("counter")
	m.prints("running\n", "gpuckpt", "cuda", "--get-state", "--pid", pid)
	m.prints("", "gpuckpt", "cuda", "--action", "lock", "--pid", pid, "--timeout", "5000")
	m.prints("", "gpuckpt", "cuda", "--action", "checkpoint", "--pid", pid)
	m.prints("checkpointed\n", "gpuckpt", "cuda", "--get-state", "--pid", pid)
	m.prints("", "gpuckpt", "cuda", "--action", "restore", "--pid", pid)
	m.prints("locked\n", "gpuckpt", "cuda", "--get-state", "--pid", pid)
	m.prints("", "gpuckpt", "cuda", "--action", "unlock", "--pid", pid)
	m.prints("", "gpuckpt", "cuda", "--toggle", "--pid", pid)
	m.prints("", "gpuckpt", "cuda", "--toggle", "--pid", pid)
	if got := next(); got != "102" {
		t.Errorf("the workload counts %s, want 102", got)
	}
	out, _, exit := m.run("gpuckpt", "cuda", "--get-restore-tid", "--pid", pid)
	if _, err := os.Stat("/proc/" + pid + "/task/" + strings.TrimSpace(out)); exit != 0 || err != nil {
		t.Errorf("restore-tid printed %q, exit status %d: %v", out, exit, err)
	}
}

func TestCUDACommandsFailClearly(t *testing.T) {
	m := newMachine(t, 1)
	pid, _ := m.start("counter")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"cuda", "--action", "unlock", "--pid", pid}, "CUDA_ERROR_ILLEGAL_STATE (401)"},
		{[]string{"cuda", "--get-state", "--pid", "1"}, "not a CUDA process"},
		{[]string{"cuda", "--get-state", "--pid", "me"}, "it is not a pid"},
		{[]string{"cuda", "--get-state"}, "no pid given\nSee 'gpuckpt cuda --help'."},
		{[]string{"cuda", "--action", "restore", "--pid", pid, "--device-map", "0=1"}, "not a GPU's UUID"},
		{[]string{"cuda", "--action", "sleep", "--pid", pid}, "unknown action"},
		{[]string{"cuda", "state", pid}, "unknown"},
		{[]string{"sleep"}, "unknown command"},
	} {
		out, errs, exit := m.run(append([]string{"gpuckpt"}, c.args...)...)
		if exit != 1 || out != "" || !strings.Contains(errs, c.want) || !strings.HasPrefix(errs, "gpuckpt: ") {
			t.Errorf("%q: exit status %d, printed %q and %q", c.args, exit, out, errs)
		}
	}
}

// Flags are checked before anything is touched; here there is no containerd. A call that is
// wrong names the command's help, one that fails does not.
func TestFlagsAreCheckedFirst(t *testing.T) {
	m := newMachine(t, 1)
	checkpoint := []string{"checkpoint", "job", "--image", "example.com/job:1", "--address", "/nonexistent.sock"}
	for _, c := range []struct {
		args []string
		want string
		hint bool
	}{
		{append(checkpoint, "--level", "99"), "level 99", false},
		{append(checkpoint, "--compression", "gzip", "--level", "12"), "level 12", false},
		{append(checkpoint, "--compression", "lz4"), "lz4", false},
		{append(checkpoint, "--in-memory", "some"), "not a size such as 16GiB", false},
		{checkpoint, "/nonexistent.sock", false},
		{[]string{"suspend", "--pod", "job", "--address", "/nonexistent.sock"}, "reach containerd at /nonexistent.sock (--address,", false},
		{[]string{"image", "convert", "dir:/", "job.tar"}, "oci-archive:job.tar", false},
		{[]string{"image", "convert", "dir:/", "./job.tar"}, "to make it, write its kind: oci-archive:./job.tar", false},
		{[]string{"image", "sign", "example.com/job:1", "example.com/job:1"}, "choose another one for DESTINATION", false},
		{[]string{"image", "inspect", t.TempDir()}, "is not a checkpoint", false},
		{[]string{"image", "inspect", "./none"}, "./none: no such file or directory\n", false},
		{[]string{"cuda", "--action", "lock", "--timeout", "5s"}, `"5s" for "-t, --timeout" flag: it must be a number`, true},
		{[]string{"restore", "x", "--runtime", "io.containerd.runc.v2"}, "would start the program from the beginning: it must be io.containerd.gpuckpt.v2", false},
		{[]string{"restore", "x", "--gpus", "GPU-1"}, `"GPU-1" for "--gpus" flag: it must be a number`, true},
		{[]string{"checkpoint", "job"}, "See 'gpuckpt checkpoint --help'.", true},
		{[]string{"image", "verify"}, "See 'gpuckpt image verify --help'.", true},
		{[]string{"restore", "x", "--none"}, "See 'gpuckpt restore --help'.", true},
	} {
		_, errs, exit := m.run(append([]string{"gpuckpt"}, c.args...)...)
		if exit != 1 || !strings.Contains(errs, c.want) || strings.Contains(errs, "--help'.") != c.hint {
			t.Errorf("%q: exit status %d, printed %q", c.args, exit, errs)
		}
	}
}

func TestVersion(t *testing.T) {
	m := newMachine(t, 1)
	if out, errs, exit := m.run("gpuckpt", "version"); exit != 0 || errs != "" || !strings.HasPrefix(out, "gpuckpt ") {
		t.Errorf("exit status %d, printed %q and %q", exit, out, errs)
	}
	var is version.Info
	if out, errs, exit := m.run("gpuckpt", "version", "--json"); exit != 0 || json.Unmarshal([]byte(out), &is) != nil || is.Version == "" || is.Commit == "" || is.Date == "" || is.Platform != runtime.GOOS+"/"+runtime.GOARCH {
		t.Errorf("exit status %d, printed %q and %q", exit, out, errs)
	}
}

// A node without a key says so.
func TestNoKeys(t *testing.T) {
	m, file := newMachine(t, 1), filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(file, []byte("[signing]\nkey = \"/nonexistent/key\"\n[restore]\nkeys = []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.env = append(m.env, "GPUCKPT_CONFIG="+file)
	if out, errs, exit := m.run("gpuckpt", "key", "list"); exit != 0 || out != "" || !strings.Contains(errs, "trusts no key") {
		t.Errorf("exit status %d, printed %q and %q", exit, out, errs)
	}
}
