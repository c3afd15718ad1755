// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// killWhile kills a process, the first that find gives another number than 0 for,
// while something is done, and gives the error of that, which must come to an end.
func killWhile(t *testing.T, do func() error, find func() int) error {
	t.Helper()
	return signalWhile(t, unix.SIGKILL, do, find)
}

// stopWhile is killWhile of a process that is not killed, and does nothing any more.
func stopWhile(t *testing.T, do func() error, find func() int) error {
	t.Helper()
	return signalWhile(t, unix.SIGSTOP, do, find)
}

func signalWhile(t *testing.T, signal unix.Signal, do func() error, find func() int) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- do() }()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		select {
		case err := <-done:
			return err
		default:
		}
		if pid := find(); pid != 0 {
			if err := unix.Kill(pid, signal); err != nil && !errors.Is(err, unix.ESRCH) {
				t.Error(err)
			}
			break
		}
	}
	select {
	case err := <-done:
		return err
	case <-time.After(30 * time.Second):
		t.Fatalf("it did not end after a process was killed\n%s", shared.LogTail(3000))
		return nil
	}
}

// tries is how often something is done in which a process is to be killed: on a busy
// machine the kill may come too late.
const tries = 8

// runcOf is the runc that restores a container; 0 for none.
func runcOf(k *harness.Container) int {
	names, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, name := range names {
		if comm, err := os.ReadFile(name); err != nil || string(comm) != "runc\n" {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if line := commandLine(pid); err == nil && strings.Contains(line, shared.Namespace()) && strings.HasSuffix(line, " "+k.ID) {
			return pid
		}
	}
	return 0
}

// tracerOf is the process that traces another one; 0 for none.
func tracerOf(pid int) int {
	text, err := harness.StatusField(pid, "TracerPid")
	if err != nil {
		return 0
	}
	tracer, _ := strconv.Atoi(text)
	return tracer
}

// checkpointed is a container that has ended after a checkpoint into a directory.
func checkpointed(t *testing.T) (k *harness.Container, dir string) {
	t.Helper()
	k = shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
	k.Expect(t, "verify", "bad=0")
	dir = t.TempDir()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	return k, dir
}

// CRIU, or runc, is killed while CRIU dumps a container: the container goes on. It does not if CRIU
// is killed in the moment in which it has its own code in the program (docs/limits.md): then another
// container is tried.
func TestKilledInDump(t *testing.T) {
	for who, find := range map[string]func(shim, criu int) int{
		"CRIU": func(_, criu int) int { return criu },
		"runc": func(shim, _ int) int { return childOf(shim, "checkpoint") },
	} {
		t.Run(who, func(t *testing.T) {
			results.Add(t)
			for try := 0; ; try++ {
				k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
				k.Expect(t, "verify", "bad=0")
				err := killInDump(t, k, find)
				harness.Says(t, err, "dump", who+" was killed", "try again", shared.CRIULogs())
				status, serr := k.Status(t.Context())
				if serr != nil {
					t.Fatal(serr)
				}
				if who == "CRIU" && status == client.Stopped && try < tries {
					t.Logf("the program ended with CRIU's code in it: %v", err)
					k.MustRemove(t)
					continue
				}
				goesOn(t, k)
				checkpointInto(t, shared, k, t.TempDir())
				goesOn(t, k)
				return
			}
		})
	}
}

// CRIU is killed while it keeps packets away from a container: they pass again, and a connection goes on.
func TestKilledInDumpUnlocksNetwork(t *testing.T) {
	for lock, missing := range map[string]func() error{
		"iptables": func() error { _, err := exec.LookPath("iptables-restore"); return err },
		"nftables": func() error {
			path, err := bins.Path("criu")
			if err == nil {
				err = exec.Command(path, "check", "--feature", "network_lock_nftables").Run()
			}
			return err
		},
	} {
		t.Run(lock, func(t *testing.T) {
			results.Add(t)
			_, err := exec.LookPath("ip")
			if err := errors.Join(err, missing()); err != nil {
				t.Skipf("this machine cannot lock a network by %s: %v", lock, err)
			}
			shared.Configured(t, "[criu.options]\nnetwork-lock = \""+lock+"\"\n")
			network := filepath.Join(t.TempDir(), "network")
			spec := harness.RunSpec{GPUs: []int{0}, OwnNetwork: true, Amend: []oci.SpecOpts{
				oci.WithLinuxNamespace(specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: network}),
			}}
			for try := 0; ; try++ {
				makeNetwork(t, network, "10.88.7.5/24")
				locked := lockOf(t, network)
				k := shared.Work(t, spec, "loop", "--interface", "eth0")
				expectIn(t, network, k, "101 open")
				err := killInDump(t, k, func(_, criu int) int {
					for pid := k.MustPid(t); !locked() && tracerOf(pid) == criu; {
						time.Sleep(time.Millisecond)
					}
					if !locked() {
						return 0
					}
					return criu
				})
				harness.Says(t, err, "dump", "CRIU was killed")
				if locked() {
					t.Errorf("packets are kept away\n%s", shared.LogTail(3000))
				}
				if status, err := k.Status(t.Context()); err == nil && status == client.Stopped && try < tries {
					t.Log("the program ended with CRIU's code in it")
					k.MustRemove(t)
					continue
				}
				expectIn(t, network, k, "102 open")
				checkpointInto(t, shared, k, t.TempDir())
				expectIn(t, network, k, "103 open")
				return
			}
		})
	}
}

// lockOf returns what tells whether packets are kept away in a network namespace: none can be sent.
func lockOf(t *testing.T, network string) (locked func() bool) {
	t.Helper()
	var s int
	onThread(t, func() error {
		f, err := os.Open(network)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		s, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	t.Cleanup(func() { unix.Close(s) })
	to := &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}
	return func() bool { return unix.Sendto(s, []byte("x"), 0, to) == unix.EPERM }
}

// killInDump kills a process, given the shim's and CRIU's, while CRIU has a container that it dumps.
func killInDump(t *testing.T, k *harness.Container, find func(shim, criu int) int) (err error) {
	t.Helper()
	pid, shim := k.MustPid(t), shimOf(t, k)
	for try := 0; try < tries && err == nil; try++ {
		dir := t.TempDir()
		err = killWhile(t, func() error { return checkpointTask(t, shared, k, dir) }, func() int {
			if tracer := tracerOf(pid); strings.HasPrefix(commandLine(tracer), "criu") {
				return find(shim, tracer)
			}
			return 0
		})
	}
	return err
}

// A container whose dump does not end tells its state and can be killed and removed meanwhile.
func TestAnswersInDump(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
	k.Expect(t, "verify", "bad=0")
	pid, began := k.MustPid(t), make(chan time.Time, 1)
	answers := func(what string, do func() error) {
		at := time.Now()
		if err := do(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if took := time.Since(at); took > 20*time.Second {
			t.Errorf("%s took %v", what, took)
		}
	}
	var err error
	for range tries {
		err = stopWhile(t, func() error { return checkpointTask(t, shared, k, t.TempDir()) }, func() int {
			criu := tracerOf(pid)
			if !strings.HasPrefix(commandLine(criu), "criu") {
				return 0
			}
			if err := unix.Kill(criu, unix.SIGSTOP); err != nil {
				t.Error(err)
			}
			began <- time.Now()
			answers("its state", func() error {
				_, err := k.Status(t.Context())
				return err
			})
			answers("the kill", func() error { return killTask(t, k) })
			return criu
		})
		if len(began) > 0 {
			break
		}
	}
	if len(began) == 0 {
		t.Fatal("no dump was long enough to stop CRIU in it")
	}
	if err == nil {
		t.Error("there is a checkpoint of a program that was killed in its dump")
	}
	t.Logf("the checkpoint ended %v after CRIU was stopped: %v", time.Since(<-began), err)
	nothingRuns(t, shared, k)
	ctr(t, shared, "tasks", "delete", k.ID)
}

func killTask(t *testing.T, k *harness.Container) error {
	_, err := shared.Client().TaskService().Kill(t.Context(), &tasks.KillRequest{ContainerID: k.ID, Signal: uint32(unix.SIGKILL)})
	return err
}

// CRIU, runc or the program is killed while CRIU restores it: the restore fails, nothing
// is left of it, and another one works.
func TestKilledInRestore(t *testing.T) {
	for who, victim := range map[string]struct {
		find func(runc int) int
		says string // that one of the errors says; "" where it depends on the instant
	}{
		// As soon as the restored process is there, and when it is nearly done.
		"CRIU early": {func(runc int) int {
			if len(childrenOf(runc, "criu")) > 1 {
				return childOf(runc, "criu")
			}
			return 0
		}, "CRIU was killed"},
		"runc": {func(runc int) int {
			if len(childrenOf(runc, "criu")) > 1 {
				return runc
			}
			return 0
		}, "runc was killed"},
		"CRIU late": {func(runc int) int { return tracerOf(childOf(runc, "gpuwork")) }, "restore processes"},
		"program": {func(runc int) int {
			if pid := childOf(runc, "gpuwork"); tracerOf(pid) != 0 {
				return pid
			}
			return 0
		}, ""},
	} {
		t.Run(who, func(t *testing.T) {
			results.Add(t)
			k, dir := checkpointed(t)
			runc, hit := 0, false
			for try := 0; try < tries && !hit; try++ {
				err := killWhile(t, func() error { return restoreTask(t, shared, k, dir) }, func() int {
					if runc == 0 || commandLine(runc) == "" {
						runc = runcOf(k)
					}
					return victim.find(runc)
				})
				t.Log(err)
				hit = err != nil && victim.says != "" && strings.Contains(err.Error(), victim.says)
				if err == nil {
					endTask(t, shared, k)
					continue
				}
				nothingRuns(t, shared, k)
				ctr(t, shared, "tasks", "delete", k.ID)
			}
			if !hit && victim.says != "" {
				t.Errorf("no error says %q", victim.says)
			}
			if err := restoreTask(t, shared, k, dir); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			goesOn(t, k)
		})
	}
}

// runc is killed while the restored processes are held, and then the driver refuses them: nothing is left, and another
// restore works.
func TestKilledBeforeFailure(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be told to refuse")
	}
	results.Add(t)
	k, dir := checkpointed(t)
	undo := shared.SoftwareGPU(t, "restore_delay_ms=2000\nfail=restore:999\n")
	err := killWhile(t, func() error { return restoreTask(t, shared, k, dir) }, func() int {
		runc := runcOf(k)
		if pid := childOf(runc, "gpuwork"); pid == 0 || !driverWorks(pid) {
			return 0
		}
		return runc
	})
	harness.Says(t, err, "restore GPU state")
	nothingRuns(t, shared, k)
	if mounts, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(mounts), k.ID+"/criu-root") {
		t.Errorf("runc's mount is left: %v", err)
	}
	undo()
	ctr(t, shared, "tasks", "delete", k.ID)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	goesOn(t, k)
}

// A CRIU that hangs in a restore is ended when its time is over, and another restore works.
func TestHungInRestore(t *testing.T) {
	results.Add(t)
	k, dir := checkpointed(t)
	undo := shared.Configured(t, "stall_timeout = \"1s\"\n")
	runc, stopped := 0, 0
	var err error
	for range tries {
		err = stopWhile(t, func() error { return restoreTask(t, shared, k, dir) }, func() int {
			if runc == 0 || commandLine(runc) == "" {
				runc = runcOf(k)
			}
			if stopped = childOf(runc, "criu"); len(childrenOf(runc, "criu")) > 1 {
				return stopped
			}
			return 0
		})
		if err != nil {
			break
		}
		endTask(t, shared, k)
	}
	harness.Says(t, err, "restore processes", "CRIU hangs", "stall_timeout")
	nothingRuns(t, shared, k)
	if commandLine(stopped) != "" {
		t.Errorf("CRIU's process %d is left", stopped)
	}
	ctr(t, shared, "tasks", "delete", k.ID)
	undo()
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	goesOn(t, k)
}

// The tracer that has mapped the GPU state is killed while the driver restores: all is
// in place, and what it has left is in nobody's way.
func TestTracerKilledInRestore(t *testing.T) {
	results.Add(t)
	k, hurry := slow(t)
	before, err := harness.Threads(k.MustPid(t))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	hurry()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	if gpu.Kind == harness.SoftwareGPU {
		hurry = shared.SoftwareGPU(t, "restore_delay_ms=2000\n")
	}
	killed := 0
	for try := 0; try < tries && killed == 0 && err == nil; try++ {
		if try > 0 {
			endTask(t, shared, k)
		}
		shim := 0
		err = killWhile(t, func() error { return restoreTask(t, shared, k, dir) }, func() int {
			runc := runcOf(k) // the parent of what waits at the gate
			if runc != 0 && shim == 0 {
				shim, _ = harness.Parent(runc)
			}
			pid, tracers := childOf(runc, "gpuwork"), childrenOf(shim, "gpuckpt-tracer")
			if now, err := harness.Threads(pid); err != nil || len(now) <= len(before) || len(tracers) == 0 || !driverWorks(pid) {
				return 0 // threads that copy for the driver
			}
			killed = tracers[len(tracers)-1]
			return killed
		})
	}
	if killed == 0 {
		t.Error("the tracer was not killed")
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	goesOn(t, k)
	hurry()
	checkpointInto(t, shared, k, t.TempDir())
	goesOn(t, k)
}

// The shim is killed while CRIU restores a container: containerd cleans up, nothing
// is left, and another restore works.
func TestShimKilledInRestore(t *testing.T) {
	results.Add(t)
	k, dir := checkpointed(t)
	var err error
	for try := 0; try < tries && err == nil; try++ {
		if try > 0 {
			endTask(t, shared, k)
		}
		err = killWhile(t, func() error { return restoreTask(t, shared, k, dir) }, func() int {
			runc := runcOf(k)
			if len(childrenOf(runc, "criu")) < 2 {
				return 0
			}
			shim, err := harness.Parent(runc)
			if err != nil {
				return 0
			}
			return shim
		})
	}
	if err == nil {
		t.Fatal("the shim was not killed while CRIU restored")
	}
	cleanedUp(t, k)
	harness.Within(t, "containerd has forgotten the task", func() bool {
		err = restoreTask(t, shared, k, dir)
		return !errdefs.IsAlreadyExists(err)
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	goesOn(t, k)
}

// The shim is killed during a checkpoint: containerd ends the container, and nothing
// is left. The container starts again.
func TestShimKilledInCheckpoint(t *testing.T) {
	for when, there := range map[string]func(pid int) bool{
		"driver": func(pid int) bool {
			state, err := harness.ProcessState(pid)
			return err == nil && state == "t"
		},
		"dump": func(pid int) bool { return strings.HasPrefix(commandLine(tracerOf(pid)), "criu") },
	} {
		t.Run(when, func(t *testing.T) {
			results.Add(t)
			k, hurry := slow(t)
			if when == "dump" {
				hurry()
			}
			pid, shim := k.MustPid(t), shimOf(t, k)
			var workers []int
			var err error
			for try := 0; try < tries && err == nil && len(workers) == 0; try++ {
				dir := t.TempDir()
				err = killWhile(t, func() error { return checkpointTask(t, shared, k, dir) }, func() int {
					if !there(pid) {
						return 0
					}
					workers = append(childrenOf(shim, "gpuckpt-"), tracerOf(pid))
					return shim
				})
			}
			if err == nil {
				t.Fatal("the shim was not killed during the checkpoint")
			}
			cleanedUp(t, k)
			harness.Within(t, "tracer, CUDA helper and CRIU end", func() bool {
				return !slices.ContainsFunc(workers, func(pid int) bool {
					state, err := harness.ProcessState(pid)
					return err == nil && state != "Z"
				})
			})
		})
	}
}

// cleanedUp waits until containerd has removed the container of a shim that was
// killed, and checks that no mount of a restore is left.
func cleanedUp(t *testing.T, k *harness.Container) {
	t.Helper()
	harness.Within(t, "containerd cleans up", func() bool {
		_, err := os.Stat(shared.Bundle(k.ID))
		return errors.Is(err, os.ErrNotExist) && len(processesOf(t, shared, k)) == 0
	})
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, k.ID) && strings.Contains(line, "criu") {
			t.Errorf("a mount is left: %s", line)
		}
	}
}
