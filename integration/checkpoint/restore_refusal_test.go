// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// nothingLeft checks that a restore that was refused has left no task, no
// bundle and no mount.
func nothingLeft(t *testing.T, c *harness.Containerd, k *harness.Container) {
	t.Helper()
	if status, err := k.Status(t.Context()); !errdefs.IsNotFound(err) {
		t.Errorf("a task is left: %q, error %v", status, err)
	}
	bundle := c.Bundle(k.ID)
	if mounts, err := harness.MountsUnder(bundle); err != nil || len(mounts) > 0 {
		t.Errorf("mounts are left: %v, error %v", mounts, err)
	}
	if _, err := os.Stat(bundle); !os.IsNotExist(err) {
		t.Errorf("the bundle is left: %v", err)
	}
	noneUnpacked(t, c)
}

// noneUnpacked checks that no unpacked checkpoint is left.
func noneUnpacked(t *testing.T, c *harness.Containerd) {
	t.Helper()
	if left := unpacked(c); len(left) > 0 {
		t.Errorf("unpacked checkpoints are left: %v", left)
	}
}

// A checkpoint may name processes that are not the container's: another one's,
// where they share their pids. The driver is asked about none of them.
func TestProcessOfAnother(t *testing.T) {
	results.Add(t)
	shared.Configured(t, harness.AnyCheckpoint+shared.Staging("unsteered", "steer = false"))
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	m, err := images.ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	m.Processes[0].PID = 2
	if err := images.WriteMetadata(dir, m); err != nil {
		t.Fatal(err)
	}
	harness.Says(t, restoreTask(t, shared, k, dir), "map GPU state", "has no process 2")
	nothingRuns(t, shared, k)
	ctr(t, shared, "tasks", "delete", k.ID)
}

// The driver's own thread maps the GPU state's files: the first may be at anything,
// with little room on its stack. One that is not there is refused.
func TestRestoreThread(t *testing.T) {
	results.Add(t)
	shared.Configured(t, harness.AnyCheckpoint)
	k, dir := checkpointed(t)
	m, err := images.ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	p := &m.Processes[0]
	thread := p.RestoreThread
	if thread <= 0 || thread == p.PID {
		t.Errorf("the driver's thread of process %d is %d", p.PID, thread)
	}
	p.RestoreThread = 4000
	if err := images.WriteMetadata(dir, m); err != nil {
		t.Fatal(err)
	}
	harness.Says(t, restoreTask(t, shared, k, dir), "map GPU state", "has no thread 4000")
	nothingRuns(t, shared, k)
	ctr(t, shared, "tasks", "delete", k.ID)
	p.RestoreThread = thread
	if err := images.WriteMetadata(dir, m); err != nil {
		t.Fatal(err)
	}
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	goesOn(t, k)
}

// A checkpoint whose metadata is not what this project writes is refused before
// anything of the container exists.
func TestDamagedMetadata(t *testing.T) {
	results.Add(t)
	shared.Configured(t, harness.AnyCheckpoint)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	path := filepath.Join(dir, images.MetadataName)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ name, text, word string }{
		{"cut short", string(good[:len(good)/2]), "malformed gpuckpt.json"},
		{"a field too many", strings.Replace(string(good), "{", `{"extra": 1,`, 1), "malformed gpuckpt.json"},
		{"of the future", strings.Replace(string(good), `"schemaVersion": 2`, `"schemaVersion": 9`, 1), "unknown schema version 9"},
	} {
		write(t, path, test.text, 0o600)
		err := restoreTask(t, shared, k, dir)
		harness.Says(t, err, test.word)
		if !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: the error is no failed precondition: %v", test.name, err)
		}
		nothingLeft(t, shared, k)
	}
	write(t, path, string(good), 0o600)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "count", "102")
}

// A node with another driver refuses, since the driver's own data lies in the
// checkpoint, and names both versions.
func TestOtherDriver(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	undo := shared.SoftwareGPU(t, "driver=590.10.01\n")
	_, err := shared.Restore(t.Context(), k.ID, ref, k.Port)
	harness.Says(t, err, "driver "+gpu.Driver, "590.10.01")
	nothingLeft(t, shared, k)
	k.MustRemove(t) // the container that ctr made for the restore
	undo()
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "102")
}

// A CRIU that is too old for a restore is refused before there is a container, which costs nothing.
func TestOldCRIURefusesRestore(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{}, "plain")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	criu := filepath.Join(t.TempDir(), "criu")
	write(t, criu, "#!/bin/sh\necho Version: 3.17.1\n", 0o755)
	shared.Configured(t, "[criu]\npath = \""+criu+"\"\n")
	_, err := shared.Restore(t.Context(), k.ID, ref, k.Port)
	harness.Says(t, err, "version 3.17.1", "too old", "install CRIU 4.2 or newer")
	nothingLeft(t, shared, k)
}

// When CRIU cannot restore, the error quotes it and names its log, which is
// kept though the container goes; nothing runs.
func TestCRIUFailsToRestore(t *testing.T) {
	results.Add(t)
	shared.Configured(t, harness.AnyCheckpoint)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	if err := os.Remove(filepath.Join(dir, "mm-1.img")); err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(shared.CRIULogs(), shared.Namespace()+"-"+k.ID+"-restore.log")
	harness.Says(t, restoreTask(t, shared, k, dir), "restore processes", "CRIU said: ", "Segmentation fault", kept)
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
	nothingRuns(t, shared, k)
}

// A port of the container that is taken is what the error says, not what CRIU's log ends with.
func TestPortTaken(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	other, err := net.ListenPacket("udp4", fmt.Sprintf(":%d", k.Port))
	if err != nil {
		t.Fatal(err)
	}
	harness.Says(t, restoreTask(t, shared, k, dir), "restore processes", "a port of the container is taken", "Address already in use")
	nothingRuns(t, shared, k)
	ctr(t, shared, "tasks", "delete", k.ID)
	other.Close()
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "count", "102")
}
