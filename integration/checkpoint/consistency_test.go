// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// written is the file that the workload "writer" appends to all the time:
// 8-byte numbers, each raised in memory before it is written.
const written = "/var/tmp/written"

// readWritten reads it through the root file system of the container's process.
func readWritten(t *testing.T, k *harness.Container) []byte {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s", k.MustPid(t), written))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// newest checks that the numbers are 1, 2, 3 and so on, and gives the last. A
// memory that is older than its file would write some twice, one that is
// younger would leave some out.
func newest(t *testing.T, data []byte) uint64 {
	t.Helper()
	if len(data) == 0 || len(data)%8 != 0 {
		t.Fatalf("%d bytes are not numbers of 8 bytes", len(data))
	}
	n := uint64(len(data) / 8)
	for i := range n {
		if got := binary.LittleEndian.Uint64(data[8*i:]); got != i+1 {
			t.Fatalf("number %d in the file is %d", i+1, got)
		}
	}
	return n
}

// grows waits until the program has written more than that many numbers.
func grows(t *testing.T, k *harness.Container, beyond uint64) {
	t.Helper()
	harness.Within(t, "the writer goes on", func() bool { return uint64(len(readWritten(t, k))/8) > beyond })
}

func number(t *testing.T, text string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// No byte of a checkpoint's files is newer than its memory: a program that
// writes all the time goes on after a restore with the very next number.
func TestFilesMatchMemory(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "writer", "--file", written)
	k.Expect(t, "count", "101")
	grows(t, k, 100)
	ref := takeCheckpoint(t, shared, k, "1")
	grows(t, k, newest(t, readWritten(t, k))) // it was left running
	k.MustRemove(t)

	saved := newest(t, blobFile(t, shared, manifest(t, shared, ref, ocispec.MediaTypeImageLayerGzip), written))
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "102")
	grows(t, r, saved+100)
	inFile := newest(t, readWritten(t, r))
	if inMemory := number(t, r.Answer(t, "seq")); inMemory < inFile {
		t.Errorf("the file has number %d, the memory only %d", inFile, inMemory)
	}
}

// Between a client's Pause and its Resume no instruction of the program runs,
// though the driver's thread must in the checkpoint.
func TestStillWhilePaused(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "writer", "--file", written)
	k.Expect(t, "count", "101")
	grows(t, k, 100)
	ctr(t, shared, "tasks", "pause", k.ID)
	before := newest(t, readWritten(t, k))
	for range 3 {
		if err := plainCheckpoint(t, shared, k); err != nil {
			t.Fatalf("%v\n%s", err, shared.LogTail(3000))
		}
		if after := newest(t, readWritten(t, k)); after != before {
			t.Fatalf("the program wrote %d numbers during the checkpoint", after-before)
		}
	}
	// Nor while a checkpoint fails and is undone.
	harness.Says(t, checkpointTask(t, shared, k, "/proc/no-place"), "/proc/no-place")
	if after := newest(t, readWritten(t, k)); after != before {
		t.Fatalf("the program wrote %d numbers during the checkpoint that failed", after-before)
	}
	isPaused(t, k, true)
	ctr(t, shared, "tasks", "resume", k.ID)
	grows(t, k, before)
	newest(t, readWritten(t, k))
	k.Expect(t, "count", "102")
}
