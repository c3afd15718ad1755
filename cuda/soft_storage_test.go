// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const custom = "SOFTCUDA_DRIVER=615.0-softcuda"

// customHelper starts a helper of a driver that has custom storage.
func customHelper(t *testing.T, dev string, env ...string) *Helper {
	t.Helper()
	return softHelper(t, dev, func(o *Options) {
		o.Env = append(o.Env, append(env, custom)...)
		o.StallTimeout = 2 * time.Second
	})
}

// files is a Storage for processes of one program, whose files are in a tmpfs.
func files(t *testing.T, g Group) (*Storage, func(p PID, number int) *os.File) {
	t.Helper()
	dir := tmpfs(t, 512)
	made := make(map[string]*os.File)
	var mu sync.Mutex
	name := func(p PID, number int) string { return fmt.Sprintf("%s/%d-%d", dir, p.Host, number) }
	s := NewStorage(g)
	s.File = func(p PID, number int) (*os.File, error) {
		f, err := os.OpenFile(name(p, number), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err == nil {
			t.Cleanup(func() { f.Close() })
			mu.Lock()
			defer mu.Unlock()
			made[name(p, number)] = f
		}
		return f, err
	}
	s.GPUs = []string{softUUID(0)}
	t.Cleanup(s.Close)
	return s, func(p PID, number int) *os.File { return made[name(p, number)] }
}

// lockedGroup finds and locks processes that run workloads.
func lockedGroup(t *testing.T, h *Helper, all ...*work) Group {
	t.Helper()
	var pids []int
	for _, w := range all {
		pids = append(pids, w.pid)
	}
	g, err := Find(t.Context(), h, pids)
	do(t, err)
	if len(g) != len(all) {
		t.Fatalf("found %+v", g)
	}
	do(t, g.Lock(t.Context(), h, time.Minute))
	return g
}

// The memory of a process goes to a file and comes back, with digests that the GPU has computed, and the process
// can be checkpointed once more.
func TestSoftStorage(t *testing.T) {
	dev := devices(t, 1)
	h := customHelper(t, dev)
	if info, err := h.Info(t.Context()); err != nil || !info.CustomStorage {
		t.Fatalf("%+v, %v", info, err)
	}
	w := start(t, dev, []string{custom}, "pattern", "--bytes", "40M")
	if got := w.ask("verify"); got != "bad=0" {
		t.Fatal(got)
	}
	for range 2 {
		g := lockedGroup(t, h, w)
		s, fileOf := files(t, g)
		s.Room = func(PID) uint64 { return 128 << 20 }
		through := s.Through(h)
		do(t, g.Checkpoint(t.Context(), through))
		w.is(h, Checkpointed)
		out := s.Out()[g[0].PID]
		if len(out) != 1 || out[0].GPU != softUUID(0) || out[0].Bytes < 40<<20 {
			t.Fatalf("out are %+v", out)
		}
		data, err := io.ReadAll(io.NewSectionReader(fileOf(g[0].PID, 0), 0, 1<<40))
		do(t, err)
		if uint64(len(data)) != out[0].Bytes {
			t.Fatalf("the file has %d bytes of %d", len(data), out[0].Bytes)
		}
		digested(t, out[0].Parts, data)
		s.Close() // another mover restores
		do(t, g.Restore(t.Context(), through, nil))
		w.is(h, Locked)
		if out := s.Out(); len(out) != 0 {
			t.Errorf("out are %+v after the restore", out)
		}
		do(t, g.Unlock(t.Context(), h))
		if got := w.ask("verify"); got != "bad=0" {
			t.Fatal(got)
		}
	}
}

// A driver without it says so, and a Storage is refused before anything is changed.
func TestSoftStorageMissing(t *testing.T) {
	dev := devices(t, 1)
	h := softHelper(t, dev, nil)
	if info, err := h.Info(t.Context()); err != nil || info.CustomStorage {
		t.Fatalf("%+v, %v", info, err)
	}
	w := start(t, dev, nil, "counter")
	w.counts(101)
	g := lockedGroup(t, h, w)
	s, _ := files(t, g)
	err := g.Checkpoint(t.Context(), s.Through(h))
	if refused, ok := errors.AsType[*Error](err); !ok || refused.Result != NotSupported {
		t.Errorf("error %v", err)
	}
	w.is(h, Locked)
	do(t, g.Unlock(t.Context(), h))
	w.counts(102)
}

// Files without room refuse a checkpoint before the driver is asked.
func TestSoftStorageWithoutRoom(t *testing.T) {
	dev := devices(t, 1)
	h := customHelper(t, dev)
	w := start(t, dev, []string{custom}, "counter")
	w.counts(101)
	g := lockedGroup(t, h, w)
	s, _ := files(t, g)
	s.Room = func(PID) uint64 { return 1 << 30 }
	if err := g.Checkpoint(t.Context(), s.Through(h)); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("error %v", err)
	}
	w.is(h, Locked)
	do(t, g.Unlock(t.Context(), h))
	w.counts(102)
}

// A copy that fails when the driver has begun, and a mover that is killed, cost the program nothing where the driver
// undoes the step, as the software GPU does. In the other case the error tells.
func TestSoftStorageFails(t *testing.T) {
	dev := devices(t, 1)
	for name, test := range map[string]struct {
		env   []string
		spoil func(t *testing.T, s *Storage)
		stuck bool
	}{
		"no room":    {spoil: func(t *testing.T, s *Storage) { replaceFiles(t, s, 16) }},
		"killed":     {env: []string{"SOFTCUDA_CHECKPOINT_DELAY_MS=1000"}, spoil: func(_ *testing.T, s *Storage) { killSoon(s) }},
		"left stuck": {env: []string{"SOFTCUDA_STUCK=1"}, spoil: func(t *testing.T, s *Storage) { replaceFiles(t, s, 16) }, stuck: true},
	} {
		t.Run(name, func(t *testing.T) {
			h := customHelper(t, dev)
			w := start(t, dev, append(test.env, custom), "pattern", "--bytes", "40M")
			if got := w.ask("verify"); got != "bad=0" {
				t.Fatal(got)
			}
			g := lockedGroup(t, h, w)
			s, _ := files(t, g)
			test.spoil(t, s)
			err := g.Checkpoint(t.Context(), s.Through(h))
			if err == nil {
				t.Fatal("checkpointed")
			}
			t.Log(err)
			if test.stuck {
				w.is(h, Checkpointing)
				return
			}
			w.is(h, Locked)
			if len(s.Out()) != 0 {
				t.Errorf("out are %+v", s.Out())
			}
			do(t, g.Unlock(t.Context(), h))
			if got := w.ask("verify"); got != "bad=0" {
				t.Fatal(got)
			}
		})
	}
}

// replaceFiles has a Storage make files where there is room for so many MiB.
func replaceFiles(t *testing.T, s *Storage, mib int) {
	dir := tmpfs(t, mib)
	s.File = func(PID, int) (*os.File, error) { return empty(t, dir), nil }
}

// killSoon kills the mover of a Storage when it is at work.
func killSoon(s *Storage) {
	s.Start = nil
	var once sync.Once
	file := s.File
	s.File = func(p PID, number int) (*os.File, error) {
		once.Do(func() {
			m := s.mover
			time.AfterFunc(500*time.Millisecond, m.Kill)
		})
		return file(p, number)
	}
}

// Of two processes one cannot be checkpointed: the other is given its memory back.
func TestSoftStorageUndoesAGroup(t *testing.T) {
	dev := devices(t, 1)
	h := customHelper(t, dev)
	one := start(t, dev, []string{custom}, "pattern", "--bytes", "24M")
	other := start(t, dev, []string{custom, "SOFTCUDA_FAIL=checkpoint:2"}, "pattern", "--bytes", "24M")
	for _, w := range []*work{one, other} {
		if got := w.ask("verify"); got != "bad=0" {
			t.Fatal(got)
		}
	}
	g := lockedGroup(t, h, one, other)
	s, _ := files(t, g)
	err := g.Checkpoint(t.Context(), s.Through(h))
	if refused, ok := errors.AsType[*Error](err); !ok || refused.Result != OutOfMemory {
		t.Errorf("error %v", err)
	}
	one.is(h, Locked)
	other.is(h, Locked)
	do(t, g.Unlock(t.Context(), h))
	for _, w := range []*work{one, other} {
		if got := w.ask("verify"); got != "bad=0" {
			t.Fatal(got)
		}
	}
}

// Of two processes one cannot be restored: the other is checkpointed again, from the files that it had. The next restore
// is good.
func TestSoftStorageRestoresAGroup(t *testing.T) {
	dev := devices(t, 1)
	h := customHelper(t, dev)
	one := start(t, dev, []string{custom}, "pattern", "--bytes", "24M")
	other := start(t, dev, []string{custom, "SOFTCUDA_FAIL=restore:2:1"}, "pattern", "--bytes", "24M")
	for _, w := range []*work{one, other} {
		if got := w.ask("verify"); got != "bad=0" {
			t.Fatal(got)
		}
	}
	g := lockedGroup(t, h, one, other)
	s, _ := files(t, g)
	do(t, g.Checkpoint(t.Context(), s.Through(h)))
	if err := g.Restore(t.Context(), s.Through(h), nil); err == nil {
		t.Fatal("restored")
	}
	one.is(h, Checkpointed)
	other.is(h, Checkpointed)
	if len(s.Out()) != 2 {
		t.Errorf("out are %+v", s.Out())
	}
	do(t, g.Restore(t.Context(), s.Through(h), nil))
	do(t, g.Unlock(t.Context(), h))
	for _, w := range []*work{one, other} {
		if got := w.ask("verify"); got != "bad=0" {
			t.Fatal(got)
		}
	}
}

// Files of another size, and files that end early, are not for the process.
func TestSoftStorageOfAnotherSize(t *testing.T) {
	dev := devices(t, 1)
	h := customHelper(t, dev)
	w := start(t, dev, []string{custom}, "counter")
	w.counts(101)
	g := lockedGroup(t, h, w)
	s, _ := files(t, g)
	do(t, g.Checkpoint(t.Context(), s.Through(h)))
	good := s.Out()[g[0].PID]
	for name, bad := range map[string]func(*Stored){
		"more":      func(s *Stored) { s.Bytes += 2 << 20 },
		"too short": func(s *Stored) { s.Spans = []Span{{File: s.Spans[0].File, Offset: 4096, Bytes: s.Bytes}} },
		"less":      func(s *Stored) { s.Spans = []Span{{File: s.Spans[0].File, Bytes: s.Bytes - 4096}} },
	} {
		wrong := NewStorage(g)
		stored := good[0]
		bad(&stored)
		wrong.Put(g[0].PID, []Stored{stored})
		wrong.GPUs = s.GPUs
		if err := g.Restore(t.Context(), wrong.Through(h), nil); err == nil {
			t.Errorf("%s: restored", name)
		} else {
			t.Log(err)
		}
		wrong.Close()
		w.is(h, Checkpointed)
	}
	// In many spans, of which some are zeros.
	again := NewStorage(g)
	again.GPUs = s.GPUs
	var spans []Span
	for at := uint64(0); at < good[0].Bytes; at += 4096 {
		span := Span{File: good[0].Spans[0].File, Offset: at, Bytes: 4096}
		if next, err := unix.Seek(int(span.File.Fd()), int64(at), unix.SEEK_DATA); err != nil || uint64(next) >= at+4096 {
			span.File = nil
		}
		spans = append(spans, span)
	}
	again.Put(g[0].PID, []Stored{{GPU: good[0].GPU, Bytes: good[0].Bytes, Spans: spans}})
	defer again.Close()
	do(t, g.Restore(t.Context(), again.Through(h), nil))
	do(t, g.Unlock(t.Context(), h))
	w.counts(102)
}
