// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package held

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// asked is a gate that notes who is to make a call.
type asked []int

func (a *asked) Call(tid int, _ uint64, _ ...uint64) error {
	*a = append(*a, tid)
	return nil
}

// A process's memory has what is lent as long as it is, and what it had afterwards. The process is looked
// at once: the second time what was found the first time is used.
func TestProcesses(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for !proc.Stopped(pid, pid) {
	}
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	read := func(at uint64) []byte {
		t.Helper()
		data := make([]byte, 4)
		if _, err := mem.ReadAt(data, int64(at)); err != nil {
			t.Fatal(err)
		}
		return data
	}
	var gate asked
	p, given := At(&gate), uint64(0)
	for round := range 2 {
		var where uint64
		err := p.Lend(pid, []byte("lent"), func(at uint64) error {
			if where = at; string(read(at)) != "lent" {
				t.Errorf("at %#x is %q", at, read(at))
			}
			return p.Call(pid, unix.SYS_GETPID)
		})
		if err != nil || bytes.Equal(read(where), []byte("lent")) {
			t.Errorf("round %d: at %#x is %q, %v", round, where, read(where), err)
		}
		if round == 1 && where != given {
			t.Errorf("it is looked at again: %#x, not %#x", where, given)
		}
		given = where + 64
		p.lent[pid], p.tids[pid] = given, 7
	}
	if len(gate) != 2 || gate[0] != pid || gate[1] != 7 {
		t.Errorf("threads %v are asked", gate)
	}
	const nobody = 1 << 30
	if err := p.Call(nobody, unix.SYS_GETPID); !proc.Ended(err) {
		t.Errorf("of nobody: %v", err)
	}
}
