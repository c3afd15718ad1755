// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build amd64

package companion

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// keeper is a program with GPU memory by its companion, ../../companion/keeptest.c.
type keeper struct {
	rank
	in  io.Writer
	out *bufio.Reader
}

func keeping(t *testing.T, mib int) *keeper {
	t.Helper()
	dir := build(t)
	cmd := exec.Command(filepath.Join(dir, "keeps"), fmt.Sprint(mib))
	cmd.Env = append(os.Environ(), "LD_PRELOAD="+filepath.Join(dir, LibraryName), "LD_LIBRARY_PATH="+dir, "SOFTCUDA_DEV="+dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	k := &keeper{rank{t: t, pid: cmd.Process.Pid}, in, bufio.NewReader(out)}
	k.hears("ready")
	return k
}

func (k *keeper) hears(want string) {
	k.t.Helper()
	line, err := k.out.ReadString('\n')
	if got := strings.TrimSpace(line); got != want || err != nil {
		k.t.Fatalf("it says %q, want %q: %v", got, want, err)
	}
}

func (k *keeper) says(request, want string) {
	k.t.Helper()
	fmt.Fprintln(k.in, request)
	k.hears(want)
}

// waits fails the test if the program answers within a moment.
func (k *keeper) waits(request string) (answer <-chan string) {
	k.t.Helper()
	fmt.Fprintln(k.in, request)
	said := make(chan string, 1)
	go func() {
		line, _ := k.out.ReadString('\n')
		said <- strings.TrimSpace(line)
	}()
	select {
	case line := <-said:
		k.t.Fatalf("%s: it does not wait, and says %q", request, line)
	case <-time.After(100 * time.Millisecond):
	}
	return said
}

// kept parks the program with its memory kept, and nowhere else.
func (k *keeper) kept(bytes uint64) *Parked {
	k.t.Helper()
	p, err := Park(k.t.Context(), cuda.Group{k.process()}, time.Minute)
	if err != nil {
		k.t.Fatal(err)
	}
	p.Keep(true)
	if n, err := p.save(k.t.Context()); err != nil || n != bytes || p.Kept() == nil {
		k.t.Fatalf("kept %d bytes: %v", n, err)
	}
	return p
}

// file is where what is kept is copied to, from an odd page on.
func (k *keeper) file(p *Parked, bytes uint64) *os.File {
	k.t.Helper()
	f, err := os.Create(filepath.Join(k.t.TempDir(), "area"))
	if err == nil {
		err = f.Truncate(int64(bytes) + 4096)
	}
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(func() { f.Close() })
	start := p.kept.all[0].start
	if !p.Kept().Fills(k.pid, start) || p.Kept().Fills(k.pid, start+4096) {
		k.t.Error("what is filled is not known")
	}
	p.Kept().Into(k.pid, start, f, 4096)
	k.says(fmt.Sprintf("map %d %d 4096 %s", start, bytes, f.Name()), "ok") // as the tracer does
	return f
}

func (k *keeper) opens(p *Parked) {
	k.t.Helper()
	if err := p.Open(k.t.Context(), cuda.Group{k.process()}); err != nil {
		k.t.Fatal(err)
	}
}

func descriptors(t *testing.T, pid any) int {
	t.Helper()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%v/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

// Memory that is kept is copied out as it was, while the program has its own, waits for room on the GPU, and for what it
// would take away. It can be kept again. Nothing of it is left in either process.
func TestKept(t *testing.T) {
	const bytes = 64 << 20
	k := keeping(t, 64)
	ours, theirs := descriptors(t, "self"), descriptors(t, k.pid)
	for i, request := range []string{"alloc 1960", "end"} {
		k.says(fmt.Sprint("set ", 7+i), "ok")
		p := k.kept(bytes)
		f := k.file(p, bytes)
		k.opens(p)
		k.says("is", fmt.Sprint(7+i))
		k.says("set 99", "ok")
		answer := k.waits(request)
		if n, err := p.Kept().Drain(t.Context(), nil); err != nil || n != bytes {
			t.Fatalf("drained %d bytes: %v", n, err)
		}
		if got := <-answer; got != "ok" {
			t.Errorf("%s: %s", request, got)
		}
		p.Kept().Close(t.Context())
		if i == 0 {
			k.says("is", "99")
		}
		if k.imported() {
			t.Error("it is mapped still")
		}
		got := make([]byte, 4096+bytes)
		if _, err := f.ReadAt(got, 0); err != nil {
			t.Fatal(err)
		}
		for at, b := range got {
			if want := byte(7 + i); b != want && at >= 4096 || b != 0 && at < 4096 {
				t.Fatalf("byte %d is %d", at, b)
			}
		}
		f.Close()
	}
	if n := descriptors(t, "self"); n != ours {
		t.Errorf("this process has %d descriptors, and had %d", n, ours)
	}
	if n := descriptors(t, k.pid); n > theirs {
		t.Errorf("the program has %d descriptors, and had %d", n, theirs)
	}
}

// Others take the GPU's memory while a program's is kept: it is copied out and in, as without keeping.
func TestKeptWithoutRoom(t *testing.T) {
	const bytes = 64 << 20
	settings := filepath.Join(t.TempDir(), "settings")
	t.Setenv("SOFTCUDA_CONF", settings)
	k := keeping(t, 64)
	k.says("set 6", "ok")
	p := k.kept(bytes)
	f := k.file(p, bytes)
	if err := os.WriteFile(settings, []byte("taken_mib=1960\n"), 0o600); err != nil { // of 2 GiB
		t.Fatal(err)
	}
	k.opens(p)
	if k.imported() {
		t.Error("there was room for the program's memory beside what was kept")
	}
	k.says("is", "6")
	k.says("set 99", "ok")
	if n, err := p.Kept().Drain(t.Context(), nil); err != nil || n != bytes {
		t.Errorf("drained %d bytes: %v", n, err)
	}
	p.Kept().Close(t.Context())
	got := make([]byte, bytes)
	if _, err := f.ReadAt(got, 4096); err != nil {
		t.Fatal(err)
	}
	for at, b := range got {
		if b != 6 {
			t.Fatalf("byte %d is %d", at, b)
		}
	}
	k.says("is", "99")
}

// What is kept and not wanted any more goes: when nobody will drain it, when who would has ended, and when the program
// is parked again.
func TestKeptLetGo(t *testing.T) {
	k := keeping(t, 8)
	gone := func(how string) {
		t.Helper()
		for began := time.Now(); k.imported(); time.Sleep(10 * time.Millisecond) {
			if time.Since(began) > 10*time.Second {
				t.Fatalf("%s: it is mapped still", how)
			}
		}
		k.says("is", "5")
	}
	k.says("set 5", "ok")
	p := k.kept(8 << 20)
	k.opens(p)
	gone("nobody wants it")

	p = k.kept(8 << 20)
	k.file(p, 8<<20)
	k.opens(p)
	if !k.imported() {
		t.Error("it was let go of early")
	}
	p.Kept().Close(t.Context())
	gone("closed")

	p = k.kept(8 << 20)
	k.file(p, 8<<20)
	k.opens(p)
	p.kept.all[0].close() // as at the end of this process
	gone("it has ended")

	p = k.kept(8 << 20)
	f := k.file(p, 8<<20)
	k.opens(p)
	again, err := Park(t.Context(), cuda.Group{k.process()}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if k.imported() {
		t.Error("a parked program has what is kept")
	}
	k.opens(again)
	if _, err := p.Kept().Drain(t.Context(), nil); err == nil {
		t.Error("it was drained all the same")
	}
	f.Close()
	gone("parked again")
}

// A program whose memory is kept does not go on without it: not by who does not know of it.
func TestKeptElsewhere(t *testing.T) {
	k := keeping(t, 8)
	k.says("set 5", "ok")
	p := k.kept(8 << 20)
	if err := Open(t.Context(), cuda.Group{k.process()}); !errors.Is(err, errLost) {
		t.Errorf("opened without its memory: %v", err)
	}
	answer := k.waits("is")
	// A pair of sockets that came to nothing, and descriptors that came one at a time.
	m := p.kept.all[0]
	for range 2 {
		if _, err := m.meet(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	k.opens(p)
	if got := <-answer; got != "5" {
		t.Errorf("it has %s", got)
	}
	over := make(chan struct{})
	close(over)
	p = k.kept(8 << 20)
	if _, err := p.Kept().Drain(t.Context(), over); err == nil {
		t.Error("drained before it was back")
	}
	k.opens(p)
	k.says("is", "5")
	// What the program writes would be in no file.
	p = k.kept(8 << 20)
	f, err := os.Create(filepath.Join(t.TempDir(), "another"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	k.file(p, 8<<20)
	p.kept.all[0].to = f
	k.opens(p)
	if _, err := p.Kept().Drain(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "does not have the file") {
		t.Errorf("drained to a file that is not mapped: %v", err)
	}
	p.Kept().Close(t.Context())
	k.says("is", "5")
	p = k.kept(8 << 20)
	k.file(p, 8<<20)
	if err := unix.Kill(k.pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); time.Since(began) < 10*time.Second; time.Sleep(time.Millisecond) {
		if c, err := Find(k.pid); c == nil && err == nil {
			break
		}
	}
	if err := p.Open(t.Context(), nil); err != nil {
		t.Errorf("a process that has ended: %v", err)
	}
	if _, err := p.Kept().Drain(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "has ended before its GPU memory was copied") {
		t.Errorf("drained: %v", err)
	}
	p.Kept().Close(t.Context())
}
