// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package told

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// A connection is to outside if another process has its other end. One whose other end nobody has, and one
// within the container, is not.
func TestOutside(t *testing.T) {
	pair := func(kind int) (int, int) {
		s, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(s[0]); unix.Close(s[1]) })
		return s[0], s[1]
	}
	inodeOf := func(fd int) uint64 {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			t.Fatal(err)
		}
		return st.Ino
	}
	_, given := pair(unix.SOCK_STREAM)
	inner, other := pair(unix.SOCK_DGRAM)
	file := os.NewFile(uintptr(given), "given")
	cmd := exec.Command("sleep", "60")
	cmd.ExtraFiles = []*os.File{file}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	inode := inodeOf(given)
	ours := map[uint64]int{inode: cmd.Process.Pid, inodeOf(inner): os.Getpid(), inodeOf(other): os.Getpid()}
	var found Told
	// Of a machine with too many descriptors it is not found, and CRIU refuses it.
	if err := found.outside(os.Getpid(), ours, 1); err != nil || len(found.inodes) > 0 {
		t.Fatalf("looking does not end: %+v, %v", found, err)
	}
	if err := found.outside(os.Getpid(), ours, mostOthers); err != nil {
		t.Fatal(err)
	}
	if len(found.inodes) != 1 || found.inodes[0] != strconv.FormatUint(inode, 10) || len(found.Closed) != 1 {
		t.Errorf("found %+v, want inode %d", found, inode)
	}
}

// built builds the library, and a program.
func built(t *testing.T, source string) (library, program string) {
	t.Helper()
	sources, err := filepath.Glob("../../../internal/criu/plugin/*.c")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	library, program = filepath.Join(dir, "library.so"), filepath.Join(dir, "program")
	for _, args := range [][]string{
		append([]string{"-fPIC", "-shared", "-fvisibility=hidden", "-o", library}, sources...),
		{"-o", program, source},
	} {
		if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
			t.Fatalf("gcc: %v\n%s", err, out)
		}
	}
	return library, program
}

// A tracer may write into shared memory that the program has without a name, and into none that others can have by one.
func TestSharedCode(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("CRIU is told so on x86-64 alone")
	}
	library, pokes := built(t, "testdata/poke.c")
	file, err := os.CreateTemp("/dev/shm", "gpuckpt-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(file.Name())
	if err := errors.Join(file.Truncate(4096), file.Chmod(0o444), file.Close()); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		preload string
		args    []string
		want    string
	}{
		{"", nil, "refused 0\n"}, {library, nil, "written 1122\n"}, {library, []string{file.Name()}, "refused 0\n"},
		{library, []string{file.Name(), "gone"}, "refused 0\n"}, {library, []string{"sysv"}, "refused 0\n"},
	} {
		cmd := exec.Command(pokes, test.args...)
		cmd.Env = []string{"LD_PRELOAD=" + test.preload}
		if got, err := cmd.CombinedOutput(); err != nil || string(got) != test.want {
			t.Errorf("%q: %v, %q, want %q", test, err, got, test.want)
		}
	}
}

// A program that the library is loaded into learns the limits of another user's process, which the kernel
// tells with CAP_SYS_RESOURCE alone. It still sets none.
func TestLimits(t *testing.T) {
	library, asks := built(t, "testdata/limits.c")
	sleeps := exec.Command("setpriv", "--reuid", "65534", "--clear-groups", "sh", "-c", "ulimit -f 77; ulimit -Sn 50; ulimit -Hn 60; echo; exec sleep 60")
	out, err := sleeps.StdoutPipe()
	if err == nil {
		err = sleeps.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sleeps.Process.Kill(); _ = sleeps.Wait() })
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	for _, preload := range []string{"", library} {
		cmd := exec.Command("setpriv", "--bounding-set", "-sys_resource", asks, strconv.Itoa(sleeps.Process.Pid))
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LD_PRELOAD=" + preload}
		want := "refused\nrefused\nrefused\nset: refused\n"
		if preload != "" {
			want = "-1 -1\n39424 39424\n50 60\nset: refused\n" // CPU time, size of a file, descriptors
		}
		if got, err := cmd.CombinedOutput(); err != nil || string(got) != want {
			t.Errorf("LD_PRELOAD=%s: %v, %s, want %s", preload, err, got, want)
		}
	}
}

// A file that an epoll watches and its process has closed is found in the other process that has it, and
// watched again.
func TestWatches(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(epoll)
	if err := unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, int(r.Fd()), &unix.EpollEvent{Events: unix.EPOLLIN, Fd: 7}); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "60")
	cmd.ExtraFiles = []*os.File{r}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	r.Close()
	var found Told
	inside := map[int]int{1: os.Getpid(), 2: cmd.Process.Pid}
	if err := found.watches(1, os.Getpid(), map[int]string{epoll: epollLink}, inside); err != nil {
		t.Fatal(err)
	}
	want := watch{pid: 1, epoll: epoll, other: 2, fd: 3, events: unix.EPOLLIN | unix.EPOLLERR | unix.EPOLLHUP, data: 7}
	if len(found.watched) != 1 || found.watched[0] != want || len(found.hidden) != 1 {
		t.Fatalf("found %+v, want %+v", found, want)
	}
	duplicate, err := unix.Dup(epoll)
	if err != nil {
		t.Fatal(err)
	}
	shared := os.NewFile(uintptr(duplicate), "epoll")
	defer shared.Close()
	forked := exec.Command("sleep", "60")
	forked.ExtraFiles = make([]*os.File, epoll-2)
	forked.ExtraFiles[epoll-3] = shared
	if err := forked.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = forked.Process.Kill(); _ = forked.Wait() })
	inside[3] = forked.Process.Pid
	found.ranks = make(map[int]int)
	found.rank(os.Getpid())
	if err := found.watches(3, inside[3], map[int]string{epoll: epollLink}, inside); err != nil || len(found.watched) != 1 || len(found.hidden) != 1 {
		t.Errorf("the epoll of a parent is looked at again: %v, %+v", err, found)
	}
	text := fmt.Sprintf("%d %d %d %d %d %d\n", want.pid, want.epoll, want.other, want.fd, want.events, want.data)
	if all, err := parse(strings.NewReader(text)); err != nil || len(all) != 1 || all[0] != want {
		t.Errorf("%q is %+v, %v", text, all, err)
	}
	for _, bad := range []string{"1 2 3", "1 -1 2 3 1 7", "1 2 2 -3 1 7", "x"} {
		if _, err := parse(strings.NewReader(bad + "\n")); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	again, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(again)
	want.epoll = again
	if err := want.restore(inside); err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	events := make([]unix.EpollEvent, 2)
	if n, err := unix.EpollWait(again, events, 1000); err != nil || n != 1 || events[0].Fd != 7 {
		t.Errorf("%d events, %v, %+v", n, err, events[0])
	}
}

func FuzzParse(f *testing.F) {
	f.Add("1 5 2 3 1 7\n")
	f.Fuzz(func(_ *testing.T, text string) { _, _ = parse(strings.NewReader(text)) })
}

// What a program can have in any number is refused when it is too much, in words.
func TestTooMuch(t *testing.T) {
	if _, err := (&Told{compared: mostComparisons}).findFile(os.Getpid(), os.Getpid(), slot{epoll: 1 << 20}, -1); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("comparisons without end: %v", err)
	}
	const nobody = 1 << 30 // has no files
	if _, err := (&Told{compared: mostComparisons}).findFile(nobody, os.Getpid(), slot{epoll: 1 << 20}, -1); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("processes without files, without end: %v", err)
	}
	many := &Told{inodes: slices.Repeat([]string{"4294967295"}, 20_000)}
	if _, err := many.Environment(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("20,000 sockets: %v", err)
	}
}

// A timer of the day's time that repeats, and whose time has come unread, has the next one, and how often it came.
func TestDayTimer(t *testing.T) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_REALTIME, unix.TFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	began := time.Now()
	often := unix.ItimerSpec{Interval: unix.NsecToTimespec(5e6), Value: unix.NsecToTimespec(began.UnixNano())}
	if err := unix.TimerfdSettime(fd, unix.TFD_TIMER_ABSTIME, &often, nil); err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond)
	timer := map[int]string{fd: timerLink}
	if err := countTimers(os.Getpid(), timer); err != nil {
		t.Fatal(err)
	}
	told := &Told{remade: make(map[int]map[int]string)}
	err = told.remadeOf(1, os.Getpid(), timer)
	words := told.remade[1]
	var flags, sec, nsec, isec, insec, ticks int64
	if n, _ := fmt.Sscanf(words[fd], "timer %d %d %d %d %d %d", &flags, &sec, &nsec, &isec, &insec, &ticks); n != 6 || err != nil {
		t.Fatalf("it is %q, %v", words[fd], err)
	}
	if ticks < 4 || insec != 5e6 || sec*1e9+nsec <= began.UnixNano()+20e6 {
		t.Errorf("it is %q, begun at %d", words[fd], began.UnixNano())
	}
}
