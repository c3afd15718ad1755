// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// CRIU's CUDA plugin drives cuda-checkpoint. These tests do what its code does,
// checkpoint-restore/criu, plugins/cuda/cuda_plugin.c: the same arguments, both
// outputs into one pipe of which it keeps so many bytes, and its parsing.

// bufSize is CUDA_CKPT_BUF_SIZE, helpSize that of cuda_checkpoint_supports_flag.
const (
	bufSize  = 128
	helpSize = 2048
)

// launch is launch_cuda_checkpoint.
func (m *machine) launch(size int, args ...string) (output string, exit int) {
	m.t.Helper()
	cmd := &exec.Cmd{ // execvp finds it in $PATH
		Path: filepath.Join(bin, "cuda-checkpoint"),
		Args: append([]string{"cuda-checkpoint"}, args...),
		Env:  m.env,
	}
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		m.t.Fatal(err)
	}
	return string(out[:min(len(out), size-1)]), cmd.ProcessState.ExitCode()
}

// restoreTID is get_cuda_restore_tid: strtol, white space, and the end.
func (m *machine) restoreTID(pid string) string {
	m.t.Helper()
	out, exit := m.launch(bufSize, "--get-restore-tid", "--pid", pid)
	tid, err := strconv.Atoi(strings.TrimSpace(out))
	if exit != 0 || err != nil || tid <= 0 || strings.TrimLeft(out, " \t") != out {
		m.t.Fatalf("restore thread of %s: exit status %d, printed %q", pid, exit, out)
	}
	return strconv.Itoa(tid)
}

// state is get_cuda_state.
func (m *machine) state(pid string) string {
	m.t.Helper()
	out, exit := m.launch(bufSize, "--get-state", "--pid", pid)
	if exit != 0 {
		m.t.Fatalf("state of %s: exit status %d, printed %q", pid, exit, out)
	}
	for _, known := range []string{"running", "locked", "checkpointed"} {
		if strings.HasPrefix(out, known) {
			return known
		}
	}
	m.t.Fatalf("state of %s: CRIU does not know %q", pid, out)
	return ""
}

// action is cuda_process_checkpoint_action; timeout is in milliseconds.
func (m *machine) action(pid, action string, timeout int) (output string, exit int) {
	m.t.Helper()
	args := []string{"--action", action, "--pid", pid}
	if timeout > 0 {
		args = append(args, "--timeout", strconv.Itoa(timeout))
	}
	return m.launch(bufSize, args...)
}

func TestCRIUFindsTheFlagItNeeds(t *testing.T) {
	m := newMachine(t, 0) // help needs no GPU
	out, exit := m.launch(helpSize, "-h")
	if exit != 0 || !strings.Contains(out, "--action") {
		t.Errorf("exit status %d, printed %q", exit, out)
	}
	if whole, _ := m.launch(1<<20, "--help"); whole != out {
		t.Errorf("the help is longer than CRIU reads, or --help is not -h:\n%s", whole)
	}
}

func TestCRIUDumpsAndResumes(t *testing.T) {
	m := newMachine(t, 1)
	pid, next := m.start("counter")
	// cuda_plugin_pause_devices. It asks for the state of the restore thread,
	// which is a thread's id where a process's is meant.
	tid := m.restoreTID(pid)
	if _, err := os.Stat("/proc/" + pid + "/task/" + tid); err != nil {
		t.Fatal(err)
	}
	if s := m.state(tid); s != "running" {
		t.Errorf("it is %s", s)
	}
	for _, step := range []struct {
		action  string
		timeout int
		state   string
	}{
		{"lock", 10000, "locked"},
		{"checkpoint", 0, "checkpointed"}, // cuda_plugin_checkpoint_devices
		{"restore", 0, "locked"},          // resume_device
		{"unlock", 0, "running"},
	} {
		if out, exit := m.action(pid, step.action, step.timeout); exit != 0 || out != "" {
			t.Fatalf("%s: exit status %d, printed %q", step.action, exit, out)
		}
		if got := m.restoreTID(pid); got != tid {
			t.Errorf("after %s the restore thread is %s, was %s", step.action, got, tid)
		}
		if s := m.state(pid); s != step.state {
			t.Errorf("after %s it is %s", step.action, s)
		}
	}
	if got := next(); got != "102" {
		t.Errorf("the workload counts %s, want 102", got)
	}
}

func TestCRIULeavesProcessesWithoutCUDAAlone(t *testing.T) {
	m := newMachine(t, 1)
	pid, _ := m.start("plain")
	// CUDA_RESTORE_TID_NOT_FOUND: an exit status above 0 that is not execvp's.
	out, exit := m.launch(bufSize, "--get-restore-tid", "--pid", pid)
	if exit <= 0 || strings.HasPrefix(out, `execvp("`) {
		t.Errorf("exit status %d, printed %q", exit, out)
	}
	if want := "Could not find restore thread for process ID " + pid + "\n"; out != want {
		t.Errorf("printed %q, want %q", out, want)
	}
}

func TestCRIUSeesRefusals(t *testing.T) {
	m := newMachine(t, 1)
	pid, next := m.start("managed")
	if out, exit := m.action(pid, "unlock", 0); exit != 401&0xff ||
		out != "Could not unlock on process ID "+pid+": \"the operation cannot be performed in the present state\"\n" {
		t.Errorf("unlock: exit status %d, printed %q", exit, out)
	}
	if out, exit := m.action(pid, "lock", 10000); exit != 0 {
		t.Fatalf("lock: exit status %d, printed %q", exit, out)
	}
	if out, exit := m.action(pid, "checkpoint", 0); exit != 801&0xff ||
		out != "Could not checkpoint on process ID "+pid+": \"operation not supported\"\n" {
		t.Errorf("checkpoint: exit status %d, printed %q", exit, out)
	}
	// cuda_plugin_fini takes it back; it marked the process checkpointed before
	// it tried, so it restores, which fails, and stops at that.
	if _, exit := m.action(pid, "restore", 0); exit == 0 {
		t.Error("a process that was not checkpointed was restored")
	}
	if out, exit := m.action(pid, "unlock", 0); exit != 0 {
		t.Errorf("unlock: exit status %d, printed %q", exit, out)
	}
	if got := next(); got != "102" {
		t.Errorf("the workload counts %s, want 102", got)
	}
}

func TestCRIUWithoutDriver(t *testing.T) {
	m := newMachine(t, 0)
	dir := t.TempDir() // whose libcuda is none, in case this machine has one
	if err := os.WriteFile(filepath.Join(dir, "libcuda.so.1"), []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.env = append(m.env, "LD_LIBRARY_PATH="+dir)
	out, exit := m.launch(bufSize, "--get-state", "--pid", "1")
	if exit != 1 || !strings.Contains(out, "no NVIDIA driver") {
		t.Errorf("exit status %d, printed %q", exit, out)
	}
}

func TestToggleAsExistingScriptsDo(t *testing.T) {
	m := newMachine(t, 1)
	pid, next := m.start("counter")
	for _, want := range []string{"checkpointed", "running"} {
		m.prints("", "cuda-checkpoint", "--toggle", "--pid", pid)
		m.prints(want+"\n", "cuda-checkpoint", "--get-state", "--pid", pid)
	}
	if got := next(); got != "102" {
		t.Errorf("the workload counts %s, want 102", got)
	}
}
