// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// told is what `ctr events` printed of an event.
type told struct {
	topic   string
	payload struct {
		ContainerID string `json:"container_id"`
		ID          string `json:"id"`
		Checkpoint  string `json:"checkpoint"`
		Labels      map[string]string
	}
}

// listen returns what `ctr events` prints from now on, with these filters.
func listen(t *testing.T, c *harness.Containerd, filters ...string) <-chan told {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ctr, err := c.Command(ctx, "ctr", append([]string{"--address", c.Address(), "--namespace", c.Namespace(), "events"}, filters...)...)
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := ctr.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	ctr.Cancel = func() error { return ctr.Process.Signal(syscall.SIGTERM) }
	if err := ctr.Start(); err != nil {
		t.Fatal(err)
	}
	all := make(chan told, 1000) // so that ctr never waits for the test
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(all)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			// 2026-11-23 03:00:00.000000001 +0000 UTC NAMESPACE TOPIC {…}
			before, payload, _ := strings.Cut(lines.Text(), " {")
			fields := strings.Fields(before)
			e := told{topic: fields[len(fields)-1]}
			if err := json.Unmarshal([]byte("{"+payload), &e.payload); err != nil {
				t.Errorf("%s: %v", lines.Text(), err)
			}
			all <- e
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-read
		_ = ctr.Wait()
	})
	return all
}

// next returns the next event of a container.
func next(t *testing.T, all <-chan told, id string) told {
	t.Helper()
	late := time.After(2 * time.Minute)
	for {
		select {
		case e, ok := <-all:
			if !ok {
				t.Fatal("ctr events has ended")
			}
			if e.payload.ContainerID == id || e.payload.ID == id {
				return e
			}
		case <-late:
			t.Fatal("no event came")
		}
	}
}

// Each operation is an event that a stock ctr prints: what runc's shim publishes, and what came of
// the operation.
func TestEvents(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	ours := listen(t, shared, `topic~="/gpuckpt/"`)
	tasks := listen(t, shared, `topic~="/tasks/(paused|resumed|checkpointed|start|exit)"`)
	// Once ctr prints an event, it listens.
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "gpuckpt.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	await(t, ours, func() {
		if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: full}); err == nil {
			t.Fatal("a checkpoint into the directory of another one succeeded")
		}
	})
	await(t, tasks, func() {
		for _, command := range []string{"pause", "resume"} {
			if _, err := shared.Ctr(t.Context(), "tasks", command, k.ID); err != nil {
				t.Fatal(err)
			}
		}
	})
	// All events before this one are of what was repeated: how many there are depends on when ctr began to listen.
	if _, err := shared.Ctr(t.Context(), "tasks", "exec", "--exec-id", "last", k.ID, "/usr/bin/gpuwork", "exit", "0"); err != nil {
		t.Fatal(err)
	}
	for next(t, tasks, k.ID).topic != "/tasks/exit" {
	}
	expect := func(topic, operation, error string) {
		t.Helper()
		e := next(t, ours, k.ID)
		labels := e.payload.Labels
		if e.topic != topic || labels["operation"] != operation || labels["took"] == "" || !strings.Contains(labels["error"], error) || (labels["error"] == "") != (error == "") {
			t.Fatalf("%s %v, want %s of a %s that says %q", e.topic, labels, topic, operation, error)
		}
		if topic == "/gpuckpt/checkpointed" && len(labels["bytes"]) < len("100000") {
			t.Errorf("a checkpoint has %s bytes", labels["bytes"])
		}
	}
	suspend(t, shared, k)
	for e := next(t, ours, k.ID); e.topic != "/gpuckpt/suspended"; e = next(t, ours, k.ID) {
		t.Logf("before the test: %s", e.topic)
	}
	dir := t.TempDir()
	_, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir})
	harness.Says(t, err, "is suspended")
	expect("/gpuckpt/checkpoint-failed", "checkpoint", "is suspended")
	resume(t, shared, k)
	expect("/gpuckpt/resumed", "resume", "")
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir}); err != nil {
		t.Fatal(err)
	}
	expect("/gpuckpt/checkpointed", "checkpoint", "")
	image := "events:" + strconv.FormatInt(time.Now().UnixNano(), 36) // not that of an earlier try
	if err := k.Checkpoint(t.Context(), image); err != nil {
		t.Fatal(err)
	}
	expect("/gpuckpt/checkpointed", "checkpoint", "")
	k.MustRemove(t)
	r, err := shared.Restore(t.Context(), k.ID, image, k.Port)
	if err != nil {
		t.Fatal(err)
	}
	expect("/gpuckpt/restored", "restore", "")
	r.Expect(t, "count", "102")
	r.MustRemove(t)
	harness.FlipBit(t, filepath.Join(dir, "inventory.img"))
	err = gpuckpt(t, shared, "restore", "--base", harness.WorkloadImage, "--name", k.ID, "--net-host", dir)
	harness.Says(t, err, "inventory.img")
	expect("/gpuckpt/restore-failed", "restore", "inventory.img")

	// runc's part of the shim and gpuckpt's publish beside each other: in no order. The exit of a shim's last container
	// is not among them: runc's part says that it has ended before it publishes so, and containerd may end the shim between.
	wanted := map[string]int{"/tasks/paused": 3, "/tasks/resumed": 3, "/tasks/checkpointed": 2, "/tasks/start": 1}
	for len(wanted) > 0 {
		e := next(t, tasks, k.ID)
		if wanted[e.topic]--; wanted[e.topic] <= 0 {
			delete(wanted, e.topic)
		}
		if e.topic == "/tasks/checkpointed" && e.payload.Checkpoint == "" {
			t.Errorf("%+v names no directory", e)
		}
	}
}

// await repeats something that is an event until one comes.
func await(t *testing.T, all <-chan told, do func()) {
	t.Helper()
	for late := time.Now().Add(2 * time.Minute); time.Now().Before(late); {
		do()
		select {
		case e, ok := <-all:
			if !ok {
				t.Fatal("ctr events has ended")
			}
			t.Logf("ctr listens: %s", e.topic)
			return
		case <-time.After(time.Second):
		}
	}
	t.Fatal("ctr events prints nothing")
}
