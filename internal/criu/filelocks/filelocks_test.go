// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package filelocks

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	filelock "github.com/checkpoint-restore/go-criu/v8/crit/images/file-lock"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/held"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// holdVariable has the test program lock a file and wait: a flock, or with "posix:" a POSIX lock.
const holdVariable = "GPUCKPT_TEST_HOLD_LOCK"

func TestMain(m *testing.M) {
	if path := os.Getenv(holdVariable); path != "" {
		path, isPOSIX := strings.CutPrefix(path, "posix:")
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err == nil && isPOSIX {
			err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		} else if err == nil {
			err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		}
		if err != nil {
			panic(err)
		}
		os.Stdout.WriteString("held\n")
		time.Sleep(time.Hour)
	}
	os.Exit(m.Run())
}

// here is a gate whose held process is this one, which makes the calls; with nothing, none.
type here struct{ nothing bool }

func (h here) Call(_ int, nr uint64, args ...uint64) error {
	if h.nothing {
		return nil
	}
	if _, _, errno := unix.Syscall(uintptr(nr), uintptr(args[0]), uintptr(args[1]), uintptr(append(args, 0)[2])); errno != 0 {
		return errno
	}
	return nil
}

func myself() ([]int, error) { return []int{os.Getpid()}, nil }

// alone is a container with this process alone.
var alone = map[int]int{os.Getpid(): os.Getpid()}

// file opens a new file, and returns its name and descriptor.
func file(t *testing.T) (string, int) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "locked")
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return path, fd
}

func entry(t *testing.T, flag, kind uint32, fd int, start, bytes int64) *filelock.FileLockEntry {
	t.Helper()
	status, err := proc.StatusOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	pid, err := status.NSPID()
	if err != nil {
		t.Fatal(err)
	}
	return &filelock.FileLockEntry{Flag: &flag, Type: &kind, Pid: new(int32(pid)), Fd: new(int32(fd)), Start: &start, Len: &bytes}
}

// Locks of each kind are taken, with their ranges, and CRIU gets none but a lease that breaks.
func TestRestore(t *testing.T) {
	_, a := file(t)
	_, b := file(t)
	_, c := file(t)
	_, d := file(t)
	var locks Locks
	for _, e := range []*filelock.FileLockEntry{
		entry(t, posix, unix.F_WRLCK, a, 10, 10), entry(t, posix, unix.F_RDLCK, a, 100, 0),
		entry(t, flock, unix.F_RDLCK, b, 0, 0), entry(t, ofd, unix.F_WRLCK, c, 5, 1), entry(t, lease, unix.F_WRLCK, d, 0, 0),
	} {
		if took, err := locks.Take(e); err != nil || !took {
			t.Fatalf("%v: took it %v, %v", e, took, err)
		}
	}
	if took, err := locks.Take(entry(t, lease, breaking, d, 0, 0)); err != nil || took {
		t.Errorf("took a lease that breaks: %v, %v", took, err)
	}
	if err := locks.Restore(alone, here{}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, fd := range []int{a, b, c, d} {
		held, err := proc.FileLocks(os.Getpid(), fd)
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range held {
			got = append(got, h.Kind+" "+h.Type+" "+strconv.FormatInt(h.Start, 10)+" "+h.End)
		}
	}
	want := []string{"POSIX WRITE 10 19", "POSIX READ 100 EOF", "FLOCK READ 0 EOF", "OFDLCK WRITE 5 5", "LEASE WRITE 0 EOF"}
	if !slices.Equal(got, want) {
		t.Errorf("held %q, want %q", got, want)
	}
}

// A lock that is missing or too much, and one that cannot be, end the restore.
func TestDifference(t *testing.T) {
	path, fd := file(t)
	want := Locks{entry(t, posix, unix.F_WRLCK, fd, 10, 10)}
	says := func(l Locks, gate held.Gate, texts ...string) {
		t.Helper()
		err := l.Restore(alone, gate)
		for _, text := range texts {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("error %v, want %q", err, text)
			}
		}
	}
	says(want, here{nothing: true}, "held a write POSIX lock on "+path+" when it was dumped, and does not hold it now")
	if err := unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: 10, Len: 10}); err != nil {
		t.Fatal(err)
	}
	says(want, here{nothing: true}, "does not hold it now") // one to read
	if err := unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: 30, Len: 1}); err != nil {
		t.Fatal(err)
	}
	says(want, here{}, "holds a read POSIX lock on file", "which the dump does not list")
	for _, e := range []*filelock.FileLockEntry{entry(t, posix, 3, fd, 0, 0), entry(t, 16, 0, fd, 0, 0), entry(t, flock, 33, fd, 0, 0), entry(t, flock, 0, -1, 0, 0)} {
		if err := (Locks{e}).Restore(alone, here{}); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%v: error %v", e, err)
		}
	}
	other := entry(t, flock, 0, fd, 0, 0)
	other.Pid = proto.Int32(1 << 22)
	says(Locks{other}, here{}, "which there is not")
}

// A lock that another program has taken is not waited for: the error names the file and the program.
func TestTaken(t *testing.T) {
	for _, kind := range []string{"", "posix:"} {
		path, fd := file(t)
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = []string{holdVariable + "=" + kind + path}
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		if _, err := out.Read(make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		e := entry(t, flock, unix.F_WRLCK, fd, 0, 0)
		if kind != "" {
			e = entry(t, posix, unix.F_WRLCK, fd, 5, 1)
		}
		err = Locks{e}.Restore(alone, here{})
		for _, text := range []string{path, "process " + strconv.Itoa(cmd.Process.Pid)} {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("error %v, want %q", err, text)
			}
		}
	}
}

// POSIX locks that CRIU has left out are added to its image, those that it has are not.
func TestComplete(t *testing.T) {
	dir := t.TempDir()
	set := image.Open(dir)
	_, fd := file(t)
	for _, at := range []int64{10, 20} {
		if err := unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 5}); err != nil {
			t.Fatal(err)
		}
	}
	_, other := file(t)
	if err := unix.Flock(other, unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	first, second := entry(t, posix, unix.F_WRLCK, fd, 10, 5), entry(t, posix, unix.F_WRLCK, fd, 20, 5)
	if err := set.Append(imageName, first); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		found, err := Find(os.Getpid(), myself)
		if err == nil {
			err = found.Complete(set)
		}
		if err != nil {
			t.Fatal(err)
		}
		var got []proto.Message
		if err := image.Open(dir).Each(imageName, func(e *image.Entry) error { got = append(got, e.Message); return nil }); err != nil {
			t.Fatal(err)
		}
		if len(got) != 2 || !proto.Equal(got[0], first) || !proto.Equal(got[1], second) {
			t.Errorf("the image has %v", got)
		}
	}
	if _, err := unix.FcntlInt(uintptr(other), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	if found, err := Find(os.Getpid(), myself); err != nil || !found.Break() {
		t.Errorf("no lease in %v, %v", found, err)
	}
}

// A lock that no descriptor has is refused.
func TestHidden(t *testing.T) {
	path, fd := file(t)
	if err := unix.Flock(fd, unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	found, err := Find(os.Getpid(), myself)
	if err != nil || found.Break() {
		t.Errorf("%v, error %v", found, err)
	}
	if err := found.Hidden(myself); err != nil {
		t.Error(err)
	}
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	mapping, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mapping); runtime.KeepAlive(mapping) }()
	unix.Close(fd)
	if found, err = Find(os.Getpid(), myself); err != nil {
		t.Fatal(err)
	}
	err = found.Hidden(myself)
	if err == nil || !strings.Contains(err.Error(), "holds a write lock (flock) on "+path+", which it has not open") {
		t.Errorf("error %v", err)
	}
}

// Nor is one lost that is in a message.
func TestHiddenInMessage(t *testing.T) {
	_, fd := file(t)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.Flock(fd, unix.LOCK_EX), unix.Sendmsg(pair[0], []byte{1}, unix.UnixRights(fd), nil, 0))
	}
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	if err := (Found)(nil).Hidden(myself); err == nil || !strings.Contains(err.Error(), "holds a write lock (flock)") {
		t.Errorf("error %v", err)
	}
	unix.Close(pair[0])
	unix.Close(pair[1])
	if err := (Found)(nil).Hidden(myself); err != nil {
		t.Error(err)
	}
}

// The kernel lists a lock under the number of a process that has ended. Who has the number now has not the
// lock, unless the file is mapped.
func TestNumberUsedAgain(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "locked"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ended := exec.Command("flock", "-n", "3")
	ended.ExtraFiles = []*os.File{f}
	if out, err := ended.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	number := ended.Process.Pid
	if held, err := proc.FileLocks(os.Getpid(), int(f.Fd())); err != nil || len(held) != 1 || held[0].PID != number {
		t.Fatalf("the file has %v, %v", held, err)
	}
	hidden := func() error {
		return (Found)(nil).Hidden(func() ([]int, error) { return []int{number, os.Getpid()}, nil })
	}
	differs := func() error { return Locks(nil).compare(map[int]int{1: number, 2: os.Getpid()}) }
	if err := errors.Join(hidden(), differs(), f.Truncate(4096)); err != nil {
		t.Error(err)
	}
	mapping, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mapping) }()
	if hidden() == nil || differs() == nil {
		t.Error("the lock of a file that is mapped is nobody's")
	}
}

// hold takes locks of a byte each, in files that are closed with the test.
func hold(t *testing.T, files, each int) (fds []int) {
	t.Helper()
	for range files {
		_, fd := file(t)
		fds = append(fds, fd)
		for at := each; at > 0; at-- {
			if err := unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: int64(2 * at), Len: 1}); err != nil {
				t.Fatal(err)
			}
		}
	}
	return fds
}

// A program with as many locks as it likes does not keep others from being looked at: their locks are
// found by their descriptors.
func TestManyLocksOfAnother(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "locked"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	other := exec.Command("sleep", "1000")
	other.ExtraFiles = []*os.File{f}
	if err := errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_EX), other.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = other.Process.Kill(), other.Wait() })
	hold(t, 40, 1<<10)
	if _, err := proc.Locks(func(*proc.Lock) bool { return false }); !errors.Is(err, proc.ErrTooMuch) {
		t.Errorf("all locks of the machine are read: %v", err)
	}
	pid := other.Process.Pid
	found, err := Find(pid, func() ([]int, error) { return []int{pid}, nil })
	status, serr := proc.StatusOf(pid)
	inside, nerr := status.NSPID()
	if err := errors.Join(err, serr, nerr); err != nil || len(found[inside][3]) != 1 {
		t.Errorf("found %v, %v", found, err)
	}
}

// Of descriptors without a lock nothing is kept: a container may have a million.
func TestDescriptorsWithoutLocks(t *testing.T) {
	hold(t, 1, 1)
	for range 100 {
		file(t)
	}
	found, err := Find(os.Getpid(), myself)
	status, serr := proc.StatusOf(os.Getpid())
	inside, nerr := status.NSPID()
	if err := errors.Join(err, serr, nerr); err != nil || len(found[inside]) != 1 {
		t.Errorf("of %d descriptors something is kept, want of 1; %v", len(found[inside]), err)
	}
}

// Each copy of a descriptor has all locks of the file: they are counted as often as they are kept.
func TestManyDescriptors(t *testing.T) {
	fd := hold(t, 1, 1<<10)[0]
	for range maxLocks >> 10 {
		copied, err := unix.Dup(fd)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(copied) })
	}
	if _, err := Find(os.Getpid(), myself); err == nil || !strings.Contains(err.Error(), "more than 100000 file locks") {
		t.Errorf("error %v", err)
	}
}
