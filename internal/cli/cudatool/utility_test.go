// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cudatool

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda"
)

const (
	uuidA = "GPU-5af7c0da-0000-4000-8000-00000000000a"
	uuidB = "GPU-5af7c0da-0000-4000-8000-00000000000b"
)

func TestCheckpointArgs(t *testing.T) {
	for _, c := range []struct {
		argv []string
		want step
	}{
		{[]string{"--get-state", "--pid", "12"}, step{op: "state", pid: 12}},
		{[]string{"--pid", "12", "--get-state"}, step{op: "state", pid: 12}},
		{[]string{"--get-restore-tid", "--pid=12"}, step{op: "restore-tid", pid: 12}},
		{[]string{"--toggle", "-p", "12"}, step{op: "toggle", pid: 12}},
		{[]string{"--toggle", "-p12"}, step{op: "toggle", pid: 12}},
		{[]string{"--action", "lock", "--pid", "12", "--timeout", "10000"}, step{op: "lock", pid: 12, timeout: 10 * time.Second}},
		{[]string{"--action", "lock", "--pid", "12", "-t", "0"}, step{op: "lock", pid: 12}},
		{[]string{"--action=checkpoint", "--pid", "12"}, step{op: "checkpoint", pid: 12}},
		{[]string{"--action", "unlock", "--pid", "12", "--timeout", "5"}, step{op: "unlock", pid: 12, timeout: 5 * time.Millisecond}},
		{[]string{"--action", "restore", "--pid", "12", "-d", uuidA + "=" + uuidB},
			step{op: "restore", pid: 12, pairs: []cuda.Pair{{Old: uuidA, New: uuidB}}}},
		{[]string{"--action", "restore", "--pid", "12", "--device-map", uuidA + "=" + uuidB},
			step{op: "restore", pid: 12, pairs: []cuda.Pair{{Old: uuidA, New: uuidB}}}},
	} {
		if got, _, err := parseCheckpointArgs(c.argv); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: got %+v, %v", c.argv, got, err)
		}
	}
	for _, argv := range [][]string{
		{}, {"--get-state"}, {"--pid", "12"}, {"--pid"}, {"--get-state", "--pid", "x"}, {"--get-state", "--pid", "0"},
		{"--get-state", "--pid", "-3"}, {"--action", "kill", "--pid", "12"}, {"--action"}, {"--what", "--pid", "12"},
		{"--get-state", "--toggle", "--pid", "12"}, {"--get-state", "--pid", "12", "13"}, {"--get-state=yes", "--pid", "12"},
		{"--action", "lock", "--pid", "12", "--timeout", "-1"}, {"--action", "lock", "--pid", "12", "--timeout", "soon"},
		{"--action", "lock", "--pid", "12", "--device-map", uuidA + "=" + uuidB},
		{"--action", "restore", "--pid", "12", "--device-map", "0=1"}, {"-x", "--pid", "12"},
	} {
		if got, _, err := parseCheckpointArgs(argv); err == nil {
			t.Errorf("%q was read as %+v", argv, got)
		}
	}
}

// Scripts for drivers from 590 on are told what to do.
func TestLaunchJob(t *testing.T) {
	_, _, err := parseCheckpointArgs([]string{"--launch-job", "python", "train.py"})
	if err == nil || !strings.Contains(err.Error(), "NVIDIA's own cuda-checkpoint") {
		t.Error(err)
	}
}

// The words are those in reports of NVIDIA's users, see utility.go.
func TestCheckpointMessages(t *testing.T) {
	refused := func(op string, r cuda.Result) error { return &cuda.Error{Op: op, PID: 4711, Result: r} }
	for _, c := range []struct {
		op   string
		err  error
		want string
		exit int
	}{
		{"restore", refused("restore", cuda.InvalidValue), `Could not restore on process ID 4711: "invalid argument"`, 1},
		{"checkpoint", refused("checkpoint", cuda.OperatingSystem), `Could not checkpoint on process ID 4711: "OS call failed or operation not supported on this OS"`, 304 & 0xff},
		{"lock", refused("lock", cuda.NotInitialized), `Could not lock on process ID 4711: "initialization error"`, 3},
		{"lock", refused("lock", cuda.NotReady), `Could not lock on process ID 4711: "device not ready"`, 600 & 0xff},
		{"restore-tid", refused("restore-tid", cuda.NotInitialized), `Could not find restore thread for process ID 4711`, 3},
		{"toggle", refused("lock", cuda.NotPermitted), `Error toggling CUDA in process ID 4711: "operation not permitted"`, 800 & 0xff},
		{"state", refused("state", cuda.NotInitialized), `Error getting process state for process ID 4711: "initialization error"`, 3},
		{"state", refused("init", cuda.NoDevice), `Error initializing CUDA: "no CUDA-capable device is detected"`, 100},
		{"state", cuda.ErrNoDriver, "no NVIDIA driver", 1},
		{"lock", refused("lock", 512), `Could not lock on process ID 4711: "unknown error"`, 1}, // never 0
	} {
		a := step{op: c.op, pid: 4711}
		if got := a.message(c.err); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
		if got := exitStatus(c.err); got != c.exit {
			t.Errorf("%v: exit status %d, want %d", c.err, got, c.exit)
		}
	}
}
