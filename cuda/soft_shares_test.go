// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// The importer of another process's memory is known by the kernel module, on the GPU that the memory
// is on; its exporter and a process with memory of its own alone are not.
func TestSoftSharesMemory(t *testing.T) {
	dev := devices(t, 2)
	h, ctx := softHelper(t, dev, nil), t.Context()
	alone, unshared := start(t, dev, nil, "counter"), start(t, dev, nil, "ipc", "--share", "handle", "--procs", "1")
	both := start(t, dev, nil, "pattern", "--bytes", "2M", "--gpus", "2")
	alone.counts(101)
	if got := both.ask("verify"); got != "bad=0" {
		t.Fatalf("on both: %q", got)
	}
	unshared.counts(101)
	for way, bytes := range map[string]uint64{"ipc": 1 << 20, "handle": 2 << 20} {
		t.Run(way, func(t *testing.T) {
			exporter := start(t, dev, nil, "ipc", "--share", way, "--gpus", "2") // the importer is on the other GPU
			exporter.counts(101)
			second := &work{t: t, port: exporter.port + 1}
			second.counts(102)
			exporter.counts(103)
			importer := proc.Children(exporter.pid)[0]
			for name, want := range map[string]struct {
				pid    int
				minors []int
				bytes  uint64
				owns   []bool
			}{
				"alone":                    {alone.pid, []int{0, 1}, 0, []bool{true, false}},
				"nobody imports":           {unshared.pid, []int{0, 1}, 0, []bool{true, false}},
				"exporter":                 {exporter.pid, []int{0, 1}, 0, []bool{true, false}},
				"importer":                 {importer, []int{0, 1}, bytes, []bool{false, true}},
				"importer, the other GPU":  {importer, []int{1}, 0, []bool{true}},
				"importer, no GPU at all":  {importer, nil, 0, []bool{}},
				"a process that has ended": {1 << 22, []int{0}, 0, []bool{false}},
				"on both":                  {both.pid, []int{0, 1}, 0, []bool{true, true}},
			} {
				has, err := h.MemoryOn(ctx, want.pid, want.minors)
				got, owns := uint64(0), []bool{}
				for _, m := range has {
					got, owns = got+m.Imported, append(owns, m.Own > 0)
				}
				if got != want.bytes || !slices.Equal(owns, want.owns) || err != nil {
					t.Errorf("%s: %+v, %v, want %d bytes of others and own ones %v", name, has, err, want.bytes, want.owns)
				}
			}
			if _, err := h.MemoryOn(ctx, importer, []int{7}); !errors.Is(err, ErrNotReported) {
				t.Errorf("a GPU that is none: %v", err)
			}
			mute := softHelper(t, dev, func(o *Options) { o.Env = append(o.Env, "SOFTCUDA_MUTE=1") })
			if _, err := mute.MemoryOn(ctx, importer, []int{0}); !errors.Is(err, ErrNotReported) {
				t.Errorf("a driver that does not report it: %v", err)
			}

			// Who does not ask loses them: the driver checkpoints both and restores neither.
			for _, pid := range []int{exporter.pid, importer} {
				do(t, h.Lock(ctx, pid, time.Minute))
				do(t, h.Checkpoint(ctx, pid))
			}
			refused(t, h.Restore(ctx, exporter.pid, nil), NotSupported)
			refused(t, h.Restore(ctx, importer, nil), InvalidValue)
		})
	}
}

// Memory with a handle comes back at its address, also where the handle has been exported and nobody
// has imported it.
func TestSoftMemoryWithAHandle(t *testing.T) {
	dev := devices(t, 1)
	h, ctx := softHelper(t, dev, nil), t.Context()
	w := start(t, dev, nil, "ipc", "--share", "handle", "--procs", "1")
	for count := range 3 {
		w.counts(101 + count)
		do(t, h.Lock(ctx, w.pid, time.Minute))
		do(t, h.Checkpoint(ctx, w.pid))
		if open, err := proc.OpenFiles(w.pid, "/memfd:softcuda"); err != nil || len(open) > 0 {
			t.Errorf("checkpointed, it has GPU memory open: %v, %v", open, err)
		}
		do(t, h.Restore(ctx, w.pid, nil))
		do(t, h.Unlock(ctx, w.pid))
	}
	w.counts(104)
}

// A file as the driver maps it for events that processes share is recognised, wherever the process sees it, and also
// without its name. Other shared memory is not taken for it.
func TestSoftSharesEvents(t *testing.T) {
	h, self := softHelper(t, devices(t, 1), nil), Process{PID: PID{Host: os.Getpid()}}
	if got, err := SharingOf(t.Context(), h, self); got.Others || err != nil {
		t.Fatalf("without such a file: %v, %v", got, err)
	}
	for name, want := range map[string]bool{
		"cuda.shm.0.37b.1": true, "cuda.shm.3e8.1f.2": true, "torch_1_2_0": false, "nccl-Ab12": false, "sem.cuda": false,
	} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, make([]byte, os.Getpagesize()), 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		memory, err := unix.Mmap(int(file.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := SharingOf(t.Context(), h, self); got.Others != want || err != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		os.Remove(path)
		if got, err := SharingOf(t.Context(), h, self); got.Others != want || err != nil {
			t.Errorf("%s, removed: %v, %v", name, got, err)
		}
		unix.Munmap(memory)
		file.Close()
	}
	if got, err := SharingOf(t.Context(), h, Process{PID: PID{Host: 1 << 30}}); got.Others || err != nil {
		t.Errorf("a process that has ended: %v, %v", got, err)
	}
}

// The kernel module knows who reaches memory of one GPU from another; who merely has two GPUs does not, and who
// does so by mappings is lost.
func TestSoftReaches(t *testing.T) {
	dev := devices(t, 2)
	h, ctx := softHelper(t, dev, nil), t.Context()
	for name, test := range map[string]struct {
		args    []string
		reaches bool
		restore Result
	}{
		"one GPU":     {[]string{"counter"}, false, 0},
		"two GPUs":    {[]string{"pattern", "--bytes", "2M", "--gpus", "2"}, false, 0},
		"peer access": {[]string{"peer"}, true, 0},
		"mappings":    {[]string{"peer", "--share", "handle"}, true, InvalidValue},
	} {
		t.Run(name, func(t *testing.T) {
			w := start(t, dev, nil, test.args...)
			w.ask("info")
			if got, err := h.Reaches(ctx, w.pid); got != test.reaches || err != nil {
				t.Errorf("%v, %v", got, err)
			}
			do(t, h.Lock(ctx, w.pid, time.Minute))
			do(t, h.Checkpoint(ctx, w.pid))
			err := h.Restore(ctx, w.pid, nil)
			if test.restore == 0 {
				do(t, err)
			} else {
				refused(t, err, test.restore)
			}
		})
	}
	if _, err := h.Reaches(ctx, os.Getpid()); !errors.Is(err, ErrNotReported) {
		t.Errorf("a process without a driver: %v", err)
	}
}
