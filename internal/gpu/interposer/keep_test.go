// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build amd64

package interposer

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// keeper is a program with GPU memory by its interposer, ../../interposer/keeptest.c.
type keeper struct {
	rank
	in  io.Writer
	out *bufio.Reader
}

func keeping(t *testing.T, mib ...int) *keeper {
	t.Helper()
	return keepingWith(t, LibraryName, mib...)
}

// keepingWith is keeping with an interposer of another name.
func keepingWith(t *testing.T, library string, mib ...int) *keeper {
	t.Helper()
	dir := build(t)
	cmd := exec.Command(filepath.Join(dir, "keeps"), strings.Fields(strings.Trim(fmt.Sprint(mib), "[]"))...)
	cmd.Env = append(os.Environ(), environment(dir)...)
	cmd.Env = append(cmd.Env, "LD_PRELOAD="+runtimes()+filepath.Join(dir, library))
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

// copier is a mover that copies the software GPU's memory, which is files, when it is let: a false in let is its failure.
type copier struct {
	let    chan bool
	killed chan struct{}
	closed atomic.Bool
}

func newCopier() *copier { return &copier{let: make(chan bool, 1), killed: make(chan struct{})} }

var errCopier = errors.New("the mover has failed")

func (c *copier) CopyOut(_ context.Context, memory []cuda.Memory, to *os.File) (cuda.Parts, error) {
	select {
	case ok := <-c.let:
		if !ok {
			return nil, errCopier
		}
	case <-c.killed:
		return nil, errCopier
	}
	offset := uint64(0)
	for _, piece := range memory {
		data := make([]byte, piece.Bytes)
		if _, err := unix.Pread(int(piece.File.Fd()), data, 0); err != nil {
			return nil, err
		}
		if _, err := to.WriteAt(data, int64(offset)); err != nil {
			return nil, err
		}
		offset += piece.Bytes
	}
	return nil, nil
}

func (c *copier) Kill() { close(c.killed) }

func (c *copier) Close() error {
	c.closed.Store(true)
	return nil
}

// kept parks the program with its memory kept, and nowhere else. The copier is to copy it to the file.
func (k *keeper) kept(bytes uint64, by *copier) (p *Parked, to *os.File) {
	k.t.Helper()
	p, err := Park(k.t.Context(), cuda.Group{k.process()}, time.Minute)
	if err != nil {
		k.t.Fatal(err)
	}
	to, err = os.Create(filepath.Join(k.t.TempDir(), "area"))
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(func() { to.Close() })
	n, err := p.save(k.t.Context(), &Keeper{
		Mover: func(context.Context) (Mover, error) { return by, nil },
		File: func(pid int, n uint64) (*os.File, error) {
			if pid != k.pid || n != bytes {
				k.t.Errorf("a file for %d bytes of process %d", n, pid)
			}
			return to, nil
		},
	})
	if err != nil || n != bytes || p.Kept() == nil {
		k.t.Fatalf("kept %d bytes: %v", n, err)
	}
	return p, to
}

// maps has the program's process map the file where its memory is saved, as the tracer does.
func (k *keeper) maps(p *Parked, to *os.File) {
	k.t.Helper()
	m := p.kept.all[0]
	k.says(fmt.Sprintf("map %d %d %s", m.start, m.bytes, to.Name()), "ok")
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

// has fails the test unless a file is so many of the byte.
func has(t *testing.T, f *os.File, want byte, bytes int) {
	t.Helper()
	got, err := os.ReadFile(f.Name())
	if err != nil || len(got) != bytes {
		t.Fatalf("%d bytes: %v", len(got), err)
	}
	for at, b := range got {
		if b != want {
			t.Fatalf("byte %d is %d", at, b)
		}
	}
}

// Memory that is kept is copied out as it was, while the program has its own and waits for room on the GPU. It can be
// kept again. Nothing of it is left in either process.
func TestKept(t *testing.T) {
	const bytes = 64 << 20
	taken := takenMemory(t)
	k := keeping(t, 64)
	ours, theirs := collected(t), descriptors(t, k.pid)
	for _, value := range []byte{7, 8} {
		k.says(fmt.Sprint("set ", value), "ok")
		by := newCopier()
		p, f := k.kept(bytes, by)
		p.Kept().Want()
		k.opens(p)
		k.says("is", fmt.Sprint(value))
		k.says("set 99", "ok")
		if k.imported() {
			t.Error("the program has what is kept")
		}
		taken(1900) // the software GPU does not count what is kept
		answer := k.waits("alloc 100")
		taken(0)
		by.let <- true
		if n, err := p.Kept().Wait(t.Context()); err != nil || n != bytes {
			t.Fatalf("copied %d bytes: %v", n, err)
		}
		if got := <-answer; got != "ok" {
			t.Errorf("more memory: %s", got)
		}
		p.Kept().Close()
		k.says("is", "99")
		has(t, f, value, bytes)
		eventually(t, "the mover is ended", by.closed.Load)
		f.Close()
	}
	eventually(t, "this process has no more descriptors", func() bool { return collected(t) <= ours })
	eventually(t, "its socket is closed", func() bool { return descriptors(t, k.pid) <= theirs })
}

// takenMemory returns what has others take so many MiB of the GPU's 2 GiB, of programs that start later.
func takenMemory(t *testing.T) func(mib int) {
	t.Helper()
	settings := filepath.Join(t.TempDir(), "settings")
	t.Setenv("SOFTCUDA_CONF", settings)
	return func(mib int) {
		t.Helper()
		if err := os.WriteFile(settings, fmt.Appendf(nil, "taken_mib=%d\n", mib), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for began := time.Now(); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > 10*time.Second {
			t.Fatal(what + ": it is not so")
		}
	}
}

// Memory that the driver's checkpoint follows is copied before it is back, as for a container that ends: it comes back
// by its descriptors all the same.
func TestKeptCopiedFirst(t *testing.T) {
	k := keeping(t, 16)
	k.says("set 4", "ok")
	by := newCopier()
	by.let <- true
	p, f := k.kept(16<<20, by)
	if n, err := p.Kept().Wait(t.Context()); err != nil || n != 16<<20 {
		t.Fatalf("copied %d bytes: %v", n, err)
	}
	has(t, f, 4, 16<<20)
	k.opens(p)
	k.says("is", "4")
	by = newCopier()
	p, _ = k.kept(16<<20, by)
	p.Forget() // it ends with its checkpoint
	if len(p.kept.all[0].memory) != 0 {
		t.Error("memory of a container that has ended is kept")
	}
	eventually(t, "the mover is ended", by.closed.Load)
}

// The GPU has no room for the program's memory beside what is kept: it waits for the copy, and has it then. So it does if
// the copy fails.
func TestKeptWithoutRoom(t *testing.T) {
	const bytes = 64 << 20
	taken := takenMemory(t)
	k := keeping(t, 64)
	for _, ok := range []bool{true, false} {
		k.says("set 6", "ok")
		by := newCopier()
		p, f := k.kept(bytes, by)
		p.Kept().Want()
		taken(1900)
		back := make(chan error, 1)
		go func() { back <- p.Open(t.Context(), cuda.Group{k.process()}) }()
		select {
		case err := <-back:
			t.Fatalf("there was room for the program's memory beside what was kept: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
		by.let <- ok
		if err := <-back; err != nil {
			t.Fatal(err)
		}
		k.says("is", "6")
		n, err := p.Kept().Wait(t.Context())
		if ok && (err != nil || n != bytes) || !ok && !errors.Is(err, errCopier) {
			t.Errorf("copied %d bytes: %v", n, err)
		}
		if ok {
			has(t, f, 6, bytes)
		}
		taken(0)
	}
}

// There is no room even for a piece: the program's memory comes back from the file, once its process has that mapped.
func TestKeptFromFile(t *testing.T) {
	const bytes = 64 << 20
	taken := takenMemory(t)
	k := keeping(t, 64)
	k.says("set 6", "ok")
	by := newCopier()
	by.let <- true
	p, f := k.kept(bytes, by)
	if _, err := p.Kept().Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	taken(1960) // 88 MiB are left, less than the memory and a piece of it
	if err := p.Open(t.Context(), cuda.Group{k.process()}); err == nil {
		t.Fatal("there was room for a second piece")
	}
	k.maps(p, f)
	k.opens(p)
	k.says("is", "6")
	taken(0)

	// Without this process, if it has said so.
	by = newCopier()
	by.let <- true
	p, f = k.kept(bytes, by)
	p.Kept().InArea() // it is not so
	if err := Open(t.Context(), cuda.Group{k.process()}); !errors.Is(err, errLost) {
		t.Errorf("opened without its memory: %v", err)
	}
	if _, err := p.Kept().Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.maps(p, f)
	p.Kept().InArea()
	p.Forget()
	if err := Open(t.Context(), cuda.Group{k.process()}); err != nil {
		t.Fatal(err)
	}
	k.says("is", "6")
}

// What goes wrong with the copy costs the program nothing: a mover that fails, one that does not start, and an end
// that nobody waits for.
func TestKeptNotCopied(t *testing.T) {
	k := keeping(t, 8)
	k.says("set 5", "ok")
	by := newCopier()
	by.let <- false
	p, _ := k.kept(8<<20, by)
	if _, err := p.Kept().Wait(t.Context()); !errors.Is(err, errCopier) {
		t.Errorf("copied: %v", err)
	}
	k.opens(p)
	k.says("is", "5")

	by = newCopier()
	p, _ = k.kept(8<<20, by)
	k.opens(p) // nobody wants the copy
	if _, err := p.Kept().Wait(t.Context()); !errors.Is(err, errCopier) {
		t.Errorf("copied: %v", err)
	}
	eventually(t, "the mover is ended", by.closed.Load)
	k.says("is", "5")

	p, err := Park(t.Context(), cuda.Group{k.process()}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	undone := 0
	n, err := p.save(t.Context(), &Keeper{
		Mover: func(context.Context) (Mover, error) { return nil, errCopier },
		File:  func(int, uint64) (*os.File, error) { return os.CreateTemp(t.TempDir(), "") },
		Undo:  func() { undone++ },
	})
	if err != nil || n != 8<<20 || p.Kept() != nil || undone != 1 {
		t.Fatalf("%d bytes: %v", n, err)
	}
	k.opens(p)
	k.says("is", "5")
}

// A program whose memory is kept does not go on without it: not by who does not know of it.
func TestKeptElsewhere(t *testing.T) {
	k := keeping(t, 8)
	k.says("set 5", "ok")
	p, _ := k.kept(8<<20, newCopier())
	if err := Open(t.Context(), cuda.Group{k.process()}); !errors.Is(err, errLost) {
		t.Errorf("opened without its memory: %v", err)
	}
	answer := k.waits("is")
	// Pairs of sockets that came to nothing, one with a message.
	m := p.kept.all[0]
	for range 2 {
		socket, taken, err := m.meet(t.Context())
		if err != nil || taken != 0 {
			t.Fatal(taken, err)
		}
		if err := unix.Sendmsg(int(socket.Fd()), make([]byte, 8), unix.UnixRights(int(m.memory[0].File.Fd())), nil, 0); err != nil {
			t.Fatal(err)
		}
		socket.Close()
	}
	k.opens(p)
	if got := <-answer; got != "5" {
		t.Errorf("it has %s", got)
	}

	// Its end does not end the copy.
	by := newCopier()
	p, f := k.kept(8<<20, by)
	p.Kept().Want()
	if err := unix.Kill(k.pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has ended", func() bool {
		c, err := Find(k.pid)
		return c == nil && err == nil
	})
	if err := p.Open(t.Context(), nil); err != nil {
		t.Errorf("a process that has ended: %v", err)
	}
	by.let <- true
	if _, err := p.Kept().Wait(t.Context()); err != nil {
		t.Errorf("copied: %v", err)
	}
	has(t, f, 5, 8<<20)
}

// A shim that ends when it was offered descriptors leaves them to the interposer. By then a program that runs may have
// closed one, and have another file by its number.
func TestOfferedAndLeft(t *testing.T) {
	k := keeping(t, 8, 12)
	k.says("set 5", "ok")
	p, err := Park(t.Context(), cuda.Group{k.process()}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	c := p.all[0]
	if now, err := c.ask(t.Context(), "keep", askKeep, 0, patience); err != nil || now.count != 2 {
		t.Fatalf("%d pieces: %v", now.count, err)
	}
	data := make([]byte, 8)
	if err := c.process.access(c.at+offDescriptors, data, false); err != nil {
		t.Fatal(err)
	}
	fds := []uint32{binary.LittleEndian.Uint32(data), binary.LittleEndian.Uint32(data[4:])}
	k.says(fmt.Sprint("replace ", fds[0]), "ok")
	if err := Open(t.Context(), cuda.Group{k.process()}); err != nil {
		t.Fatal(err)
	}
	k.says("is", "5")
	if file, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", k.pid, fds[0])); file != "/dev/null" {
		t.Errorf("the interposer has closed a file of the program's: %v", err)
	}
	if file, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", k.pid, fds[1])); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is open: %v", file, err)
	}
}

// cut makes other pieces of memory: those of a restore do not end where blocks do.
func cut(t *testing.T, memory []cuda.Memory, sizes ...uint64) (pieces []cuda.Memory) {
	t.Helper()
	var all []byte
	for _, m := range memory {
		data := make([]byte, m.Bytes)
		if _, err := unix.Pread(int(m.File.Fd()), data, 0); err != nil {
			t.Fatal(err)
		}
		all = append(all, data...)
	}
	for _, n := range sizes {
		fd, err := unix.MemfdCreate("piece", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "piece")
		t.Cleanup(func() { f.Close() })
		if _, err := f.Write(all[:n]); err != nil {
			t.Fatal(err)
		}
		pieces, all = append(pieces, cuda.Memory{File: f, Bytes: n}), all[n:]
	}
	return pieces
}

// A process takes pieces that begin and end within its blocks, and those that are right after some that are not.
func TestTake(t *testing.T) {
	k := keeping(t, 8, 12)
	k.says("set 5", "ok")
	p, _ := k.kept(20<<20, newCopier())
	m := p.kept.all[0]
	socket, _, err := m.meet(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	pieces := cut(t, m.memory, 6<<20, 4<<20, 10<<20)
	must := func(memory []cuda.Memory, want uint32) {
		t.Helper()
		if now, err := m.take(t.Context(), socket, memory, 0); err != nil || now.count != want {
			t.Fatalf("%d pieces are taken: %v", now.count, err)
		}
	}
	must(pieces[:1], 1)
	if _, err := m.ask(t.Context(), "return", askReturn, 0, patience); err == nil {
		t.Error("a process returned without all of its memory")
	}
	for _, bad := range [][]cuda.Memory{{{File: pieces[1].File, Bytes: 16 << 20}}, {pieces[1], pieces[2], pieces[2]}} {
		if now, err := m.take(t.Context(), socket, bad, 0); err == nil || now.count != 1 {
			t.Errorf("%d pieces are taken: %v", now.count, err)
		}
	}
	must(pieces[1:], 3)
	if _, err := m.ask(t.Context(), "return", askReturn, 0, patience); err != nil {
		t.Fatal(err)
	}
	m.closeMemory()
	k.opens(p)
	k.says("is", "5")
}

// A block that is filled in part, and that the driver does not take back when the program's memory comes from the file
// instead, is filled from there.
func TestTakenInPart(t *testing.T) {
	settings := filepath.Join(t.TempDir(), "settings")
	t.Setenv("SOFTCUDA_CONF", settings)
	k := keeping(t, 8)
	p, f := k.kept(8<<20, newCopier())
	if _, err := f.Write(bytes.Repeat([]byte{9}, 8<<20)); err != nil {
		t.Fatal(err)
	}
	k.maps(p, f)
	m := p.kept.all[0]
	socket, _, err := m.meet(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if _, err := m.take(t.Context(), socket, cut(t, m.memory, 2<<20), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(settings, []byte("unmap_code=999\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := m.ask(t.Context(), "bring back", askBack, fromCheckpoint, patience); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(settings); err != nil {
		t.Fatal(err)
	}
	p.Forget()
	if err := Open(t.Context(), cuda.Group{k.process()}); err != nil {
		t.Fatal(err)
	}
	k.says("is", "9")
}

// noGate holds no threads.
type noGate struct{}

func (noGate) Free(int) error { return nil }
func (noGate) Hold(int) error { return nil }

// A restored process takes memory that is ready. Where there is none, or not all of it can be taken, it has its memory from
// the file. All descriptors are given up.
func TestReady(t *testing.T) {
	const mib = 1 << 20
	for name, test := range map[string]struct {
		sizes []uint64
		want  string
	}{
		"all of it":     {[]uint64{6 * mib, 4 * mib, 10 * mib}, "5"},
		"none":          {nil, "9"},
		"too little":    {[]uint64{6 * mib, 4 * mib}, "9"},
		"a wrong piece": {[]uint64{6 * mib, 16 * mib}, "9"},
	} {
		t.Run(name, func(t *testing.T) {
			k := keeping(t, 8, 12)
			k.says("set 5", "ok")
			p, f := k.kept(20*mib, newCopier())
			if _, err := f.Write(bytes.Repeat([]byte{9}, 20*mib)); err != nil {
				t.Fatal(err)
			}
			k.maps(p, f)
			m := p.kept.all[0]
			var pieces []cuda.Memory
			for i, n := range test.sizes {
				size := min(n, 10*mib) // that of the wrong piece is not what it has
				pieces = append(pieces, cut(t, m.memory, size)[0])
				pieces[i].Bytes = n
			}
			err := OpenHeld(t.Context(), cuda.Group{k.process()}, noGate{}, func(_ context.Context, pid int, start, n uint64) []cuda.Memory {
				if pid != k.pid || start != m.start || n != 20*mib {
					t.Errorf("%d bytes at %#x of process %d are asked for", n, start, pid)
				}
				return pieces
			})
			if err != nil {
				t.Fatal(err)
			}
			k.says("is", test.want)
			for _, piece := range pieces {
				if err := piece.File.Close(); !errors.Is(err, os.ErrClosed) {
					t.Errorf("a descriptor is still open: %v", err)
				}
			}
			p.Forget()
		})
	}
}

// withoutWords has GPUs that cannot wait for words of memory: events that processes share are the driver's.
func withoutWords(t *testing.T) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "conf")
	if err := os.WriteFile(file, []byte("no_words = 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SOFTCUDA_CONF", file)
}

// A program that shares what its interposer does not bring back does so as without it, and is refused: also one that has no
// memory of its interposer's. It runs on with its memory.
func TestForeign(t *testing.T) {
	const notWanted = "-not-wanted"
	for _, kind := range []string{"event", "event" + notWanted, "event-of-another", "pool", "pool-of-another", "external-memory", "external-semaphore", "multicast", "fabric", "host", "host-exported"} {
		for _, mib := range [][]int{{8}, nil} {
			t.Run(fmt.Sprint(kind, mib), func(t *testing.T) {
				switch kind {
				case "event":
					withoutWords(t)
				case "event" + notWanted:
					t.Setenv("GPUCKPT_INTERPOSER_EVENTS", "off")
				}
				k := keeping(t, mib...)
				k.says("set 5", "ok")
				self := cuda.Group{k.process()}
				p, err := Park(t.Context(), self, time.Minute)
				if err != nil || (p == nil) != (mib == nil) {
					t.Fatalf("%v before it shares: %v", p, err)
				}
				k.opens(p)
				k.says("share "+strings.TrimSuffix(kind, notWanted), "ok")
				p, err = Park(t.Context(), self, time.Minute)
				if err == nil || p.Refusal() == nil || !strings.Contains(err.Error(), map[bool]string{false: "does not bring back", true: "NCCL_CUMEM_HOST_ENABLE=0"}[strings.HasPrefix(kind, "host")]) {
					t.Fatalf("parked: %v, %v", err, p.Refusal())
				}
				if mib != nil {
					k.says("is", "5")
					k.says("set 6", "ok")
				}
			})
		}
	}
}

// A program that has had host memory of the driver for a moment is not refused: NCCL makes some once, to see whether it can.
func TestHostForAMoment(t *testing.T) {
	k := keeping(t, 8)
	k.says("set 5", "ok")
	k.says("share host-for-a-moment", "ok")
	p, err := Park(t.Context(), cuda.Group{k.process()}, time.Minute)
	if err != nil || p == nil || p.Refusal() != nil {
		t.Fatalf("%+v, %v", p, err)
	}
	k.opens(p)
	k.says("is", "5")
}

// collected returns the descriptors of this process, without those of interposers that nobody uses any more.
func collected(t *testing.T) int {
	t.Helper()
	for range 2 { // a file is closed after the collection that finds it
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
	}
	return descriptors(t, "self")
}

// A program has its memory left to the driver from when it calls the driver past the interposer on.
func TestBypassed(t *testing.T) {
	dir := build(t)
	for _, test := range []struct{ name, how, library string }{
		{name: "another copy of the driver's library", how: "copy " + copied(t, filepath.Join(dir, "libcuda.so.1"))},
		{name: "a library that is linked past it", how: "load " + filepath.Join(dir, "linked.so")},
		{name: "no thunk is left", how: "look cuStreamIsCapturing_ptsz", library: "few/" + LibraryName},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.library != "" {
				direct, err := os.ReadFile("../../../interposer/direct.inc")
				if err != nil {
					t.Fatal(err)
				}
				few := fmt.Sprint("THUNKS=", strings.Count(string(direct), "\nDIRECT("))
				if out, err := exec.Command("make", "-s", "-C", "../../../interposer", "OUT="+filepath.Join(dir, "few"), few).CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
			k := keepingWith(t, cmp.Or(test.library, LibraryName), 8)
			self := cuda.Group{k.process()}
			k.says("set 5", "ok")
			p, err := Park(t.Context(), self, time.Minute)
			if err != nil || p == nil {
				t.Fatalf("before: %+v, %v", p, err)
			}
			k.opens(p)
			k.says(test.how, "ok")
			if p, err := Park(t.Context(), self, time.Minute); p != nil || err == nil || !strings.Contains(err.Error(), "801") {
				t.Fatalf("parked: %+v, %v", p, err)
			}
			k.says("is", "5")
			k.says("set 6", "ok")
		})
	}
}

// A program that has a library with names like the driver's is parked while a thread of it loads and unloads another one.
func TestParkedWhileItLoads(t *testing.T) {
	k := keeping(t, 8)
	k.says("loads "+filepath.Join(build(t), "linked.so"), "ok")
	defer time.AfterFunc(30*time.Second, func() { unix.Kill(k.pid, unix.SIGKILL) }).Stop() // if the two wait for each other
	for range 50 {
		p, err := Park(t.Context(), cuda.Group{k.process()}, 10*time.Second)
		if err != nil || p == nil {
			t.Fatalf("%+v, %v", p, err)
		}
		k.opens(p)
	}
}

// copied returns a copy of a file, of the same name.
func copied(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	to := filepath.Join(t.TempDir(), filepath.Base(file))
	if err := errors.Join(err, os.WriteFile(to, data, 0o600)); err != nil {
		t.Fatal(err)
	}
	return to
}
