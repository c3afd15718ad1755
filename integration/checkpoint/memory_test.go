// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Large mappings of host memory go past CRIU and come back bit by bit, in a container with a GPU and
// in one without, beside memory that CRIU restores: small, shared with a child, or read-only. What is
// restored can be checkpointed again.
func TestHostMemory(t *testing.T) {
	for _, workload := range []string{"memory", "gpumemory"} {
		t.Run(workload, func(t *testing.T) {
			results.Add(t)
			var spec harness.RunSpec
			size := uint64(144)
			if workload == "gpumemory" {
				spec.GPUs = []int{0}
				if gpu.Kind == harness.RealGPU {
					size = 640 // the driver has 120 MB of its own, and what is less than twice CRIU's part is left to CRIU
				}
			}
			k := shared.Work(t, spec, workload, "--bytes", fmt.Sprintf("%dM", size))
			k.Expect(t, "verify", "bad=0,0")
			where := k.Answer(t, "where")
			before := len(shared.Log())
			first := takeCheckpoint(t, shared, k, "1")
			pastCRIU(t, before)
			k.Expect(t, "verify", "bad=0,0") // it was left running
			k.Expect(t, "write 5", "wrote")
			second := takeCheckpoint(t, shared, k, "2")
			k.MustRemove(t)
			for _, ref := range []string{first, second} {
				r := restore(t, shared, k.ID, ref, k.Port)
				r.Expect(t, "verify", "bad=0,0")
				r.Expect(t, "where", where)
				filled(t, r, size)
				inHugePages(t, r)
				r.Expect(t, "write 9", "wrote")
				if ref == second {
					ref = takeCheckpoint(t, shared, r, "3")
					r.MustRemove(t)
					r = restore(t, shared, k.ID, ref, k.Port)
					r.Expect(t, "verify", "bad=0,0")
					if workload == "gpumemory" {
						endsWith(t, r)
					}
				}
				r.MustRemove(t)
			}
		})
	}
}

// endsWith ends a container with a checkpoint, and fails the test unless the kernel got help with its memory.
func endsWith(t *testing.T, k *harness.Container) {
	t.Helper()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: t.TempDir(), Exit: true}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	if !strings.Contains(shared.Log(), "helped to free the memory of 1 processes") {
		t.Errorf("the kernel has freed the program's memory alone:\n%s", shared.LogTail(3000))
	}
}

// Host memory that the driver has page-locked goes past CRIU as well, comes back at its place, and the GPU
// sees it there: what cuMemHostAlloc returned, and what cuMemHostRegister was given.
func TestPinnedHostMemory(t *testing.T) {
	for name, kind := range map[string]string{"allocated": "1", "registered": "2"} {
		t.Run(name, func(t *testing.T) {
			results.Add(t)
			const size = 160
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "16M", "--host-bytes", fmt.Sprintf("%dM", size), "--pinned", kind)
			k.Expect(t, "verify", "bad=0")
			where := k.Answer(t, "where")
			before := len(shared.Log())
			ref := takeCheckpoint(t, shared, k, "1")
			if kind == "1" {
				sharedPastCRIU(t, before, size)
			}
			k.Expect(t, "verify", "bad=0") // it was left running
			k.MustRemove(t)
			r := restore(t, shared, k.ID, ref, k.Port)
			r.Expect(t, "where", where)
			if gpu.Kind == harness.SoftwareGPU { // a real one's driver has memory of its own
				filled(t, r, size)
			}
			r.Expect(t, "verify", "bad=0")
			r.Expect(t, "count", "101")
		})
	}
}

// Shared memory of several kinds goes past CRIU once, though two processes have it, and they share it after
// each restore: anonymous memory, large and in many pieces, memfds, and one of shmget. What can only be read,
// or what nobody has mapped, CRIU restores. What is restored can be checkpointed again, and CRIU alone
// dumps what was restored past it, and restores what was dumped so.
func TestSharedMemory(t *testing.T) {
	results.Add(t)
	const size = 144
	const parts = size - size/2/11 + 8*4 + 4 + 4 // MiB that there are: but for zeros, of small pieces, shmget, a sparse file
	k := shared.Work(t, harness.RunSpec{}, "segments", "--bytes", fmt.Sprintf("%dM", size))
	k.Expect(t, "verify", "bad=0,0")
	again := func(seed string, dumpPast, fillPast bool) {
		const alone = "[debug]\nhost_memory = 0\n"
		k.Expect(t, "write "+seed, "bad=0,0")
		undo := func() {}
		if !dumpPast {
			undo = shared.Configured(t, alone)
		}
		before := len(shared.Log())
		ref := takeCheckpoint(t, shared, k, seed)
		undo()
		if dumpPast {
			sharedPastCRIU(t, before, parts)
		}
		k.Expect(t, "verify", "bad=0,0") // it was left running
		k.MustRemove(t)
		if undo = func() {}; !fillPast {
			undo = shared.Configured(t, alone)
		}
		k = restore(t, shared, k.ID, ref, k.Port)
		undo()
		if fillPast {
			filled(t, k, parts)
		}
		if charged := shmemOf(t, k); charged < (parts-8)<<20 { // pages of zeros are not there
			t.Errorf("the container is charged with %d bytes of shared memory, and has %d MiB", charged, parts)
		}
		k.Expect(t, "verify", "bad=0,0")
	}
	again("5", true, true)
	again("9", true, false)
	again("13", false, true)
}

// sharedPastCRIU fails the test unless the log, from there on, says that so many MiB of shared memory were dumped
// past CRIU, or a little more, and that CRIU has dumped nothing that it was to leave out.
func sharedPastCRIU(t *testing.T, from int, want uint64) {
	t.Helper()
	log := shared.Log()[from:]
	said := regexp.MustCompile(`shared memory went past CRIU.* bytes=(\d+)`).FindStringSubmatch(log)
	if said == nil || strings.Contains(log, "CRIU dumps all memory") || strings.Contains(log, "CRIU has dumped") {
		t.Fatalf("CRIU has dumped shared memory:\n%s", log)
	}
	if bytes, err := strconv.ParseUint(said[1], 10, 64); err != nil || bytes < want<<20 || bytes > (want+8)<<20 {
		t.Errorf("%d bytes went past CRIU, want %d MiB", bytes, want)
	}
}

// pastCRIU fails the test unless the log, from there on, says that large mappings were dumped past CRIU, and that
// CRIU has dumped nothing that it was to leave out.
func pastCRIU(t *testing.T, from int) {
	t.Helper()
	log := shared.Log()[from:]
	if strings.Contains(log, "CRIU dumps all memory") || strings.Contains(log, "CRIU has dumped the memory") {
		t.Errorf("it was not tried:\n%s", shared.LogTail(3000))
	}
	if !strings.Contains(log, "went past CRIU") {
		t.Errorf("CRIU has dumped the large mappings:\n%s", shared.LogTail(3000))
	}
}

// filled fails the test unless large mappings of so many MiB were restored past CRIU. Half of them lack every
// eleventh page.
func filled(t *testing.T, r *harness.Container, size uint64) {
	t.Helper()
	timeline, err := shared.Timeline(r.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range timeline.Phases {
		if p.Name == "fill memory" && p.Bytes >= (size-size/16)<<20 && p.Bytes < (size+16)<<20 {
			return
		}
	}
	t.Errorf("CRIU has restored the large mappings: %+v", timeline.Phases)
}

// inHugePages fails the test unless restored memory is in huge pages, where the kernel has some for those
// who ask.
func inHugePages(t *testing.T, r *harness.Container) {
	t.Helper()
	setting, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/enabled")
	if err != nil || strings.Contains(string(setting), "[never]") {
		t.Logf("not checked: the kernel gives no huge pages: %s, %v", setting, err)
		return
	}
	pid, err := r.Pid(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		t.Fatal(err)
	}
	advised := 0
	for line := range strings.SplitSeq(string(text), "\n") {
		if strings.HasPrefix(line, "VmFlags:") && strings.Contains(line+" ", " hg ") {
			advised++
		}
	}
	if advised == 0 {
		t.Errorf("nothing of the restored memory was to be in huge pages:\n%s", text)
	}
}
