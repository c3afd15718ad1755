// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// fakeEnv makes the test binary a helper that misbehaves as its value says.
const fakeEnv = "GPUCKPT_TEST_HELPER"

func TestMain(m *testing.M) {
	if manner := os.Getenv(fakeEnv); manner != "" {
		fakeHelper(manner)
		os.Exit(0)
	}
	dir, err := os.MkdirTemp("", "gpuckpt-cuda-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	softDir = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// fake starts a Helper that is the test binary.
func fake(t *testing.T, manner string, more func(*Options)) *Helper {
	t.Helper()
	o := Options{Path: os.Args[0], Env: []string{fakeEnv + "=" + manner}, CallTimeout: time.Minute}
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

func fakeHelper(manner string) {
	manner, arg, _ := strings.Cut(manner, ":")
	switch manner {
	case "client":
		path, pid, _ := strings.Cut(arg, ":")
		target, _ := strconv.Atoi(pid)
		h, err := Start(context.Background(), Options{Path: path})
		if err == nil {
			err = h.Checkpoint(context.Background(), target)
		}
		fmt.Fprintln(os.Stderr, "client was to be killed:", err)
		os.Exit(1)
	case "exit at once":
		fmt.Fprintln(os.Stderr, "cannot work today")
		os.Exit(7)
	case "deaf":
		time.Sleep(time.Hour)
	case "close socket":
		unix.Close(worker.FD)
		time.Sleep(time.Hour)
	}
	driver := newMachine(arg)
	client, err := worker.NewServer(wire.MaxMessage)
	if err != nil {
		panic(err)
	}
	for {
		m, err := client.Next()
		if err != nil {
			return
		}
		id := m.ID
		var q wire.Request
		if err := worker.Decode(m.Body, &q); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		var r wire.Reply
		switch manner {
		case "die":
			fmt.Fprintln(os.Stderr, "first line\nout of luck")
			os.Exit(3)
		case "kill":
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		case "hang":
			continue
		case "hang for 2":
			if q.PID == 2 {
				continue
			}
		case "garbage":
			unix.Write(worker.FD, []byte("\x7fELF and so on"))
			continue
		case "wrong id":
			id += 100
		case "no driver":
			r.Fault, r.Text = wire.FaultNoDriver, "libcuda.so.1: not found"
		case "too old":
			r.Fault, r.Text = wire.FaultTooOld, "535.104.05"
		case "no device":
			r.Fault, r.Code, r.Text = wire.FaultInit, 100, "no CUDA-capable device is detected"
		case "unknown fault":
			r.Fault = "tired"
		case "machine":
			r = driver.serve(q)
		}
		if err := client.Answer(id, r); err != nil {
			panic(err)
		}
	}
}

// machine keeps the driver's state machine for processes that do not exist.
type machine struct {
	state map[int]State
	fail  map[string]int // "checkpoint 2": the code that this operation answers for pid 2
}

// newMachine reads "1=running 2=locked !checkpoint 2=801".
func newMachine(s string) *machine {
	m := &machine{map[int]State{}, map[string]int{}}
	for f := range strings.SplitSeq(s, ";") {
		key, value, ok := strings.Cut(f, "=")
		if !ok {
			continue
		}
		if op, fails := strings.CutPrefix(key, "!"); fails {
			m.fail[op], _ = strconv.Atoi(value)
			continue
		}
		pid, _ := strconv.Atoi(key)
		for state, name := range stateNames {
			if name == value {
				m.state[pid] = state
			}
		}
	}
	return m
}

func (m *machine) serve(q wire.Request) wire.Reply {
	if code := m.fail[fmt.Sprintf("%s %d", q.Op, q.PID)]; code != 0 {
		return wire.Reply{Code: code}
	}
	s, known := m.state[q.PID]
	if !known {
		return wire.Reply{Code: int(NotInitialized)}
	}
	steps := map[string][2]State{
		wire.OpLock: {Running, Locked}, wire.OpCheckpoint: {Locked, Checkpointed},
		wire.OpRestore: {Checkpointed, Locked}, wire.OpUnlock: {Locked, Running},
	}
	step, ok := steps[q.Op]
	switch {
	case q.Op == wire.OpRestoreThread:
		return wire.Reply{Value: q.PID}
	case !ok:
		return wire.Reply{Value: int(s)}
	case s != step[0]:
		return wire.Reply{Code: int(IllegalState)}
	}
	m.state[q.PID] = step[1]
	return wire.Reply{}
}
