// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const nobody = 1 << 30 // above every pid

// sleeper starts a child, and returns its pid once it is the program "sleep".
func sleeper(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	// Between fork and exec it is still this program. Its name comes first, its environment last.
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		env, err := Environment(cmd.Process.Pid)
		if Command(cmd.Process.Pid) == "sleep" && err == nil && len(env) > 0 && env[0] != "" {
			break
		}
	}
	return cmd.Process.Pid
}

func TestProcess(t *testing.T) {
	pid := sleeper(t)
	if got, want := Describe(pid), strconv.Itoa(pid)+" (sleep)"; got != want {
		t.Errorf("Describe returns %q, want %q", got, want)
	}
	if args, err := Arguments(pid); err != nil || !slices.Equal(args, []string{"sleep", "1000"}) {
		t.Errorf("Arguments returns %q, %v", args, err)
	}
	if env, err := Environment(pid); err != nil || !slices.ContainsFunc(env, func(s string) bool { return strings.HasPrefix(s, "PATH=") }) {
		t.Errorf("Environment returns %q, %v", env, err)
	}
	if !slices.Contains(Children(os.Getpid()), pid) {
		t.Errorf("%d is not among the children %v", pid, Children(os.Getpid()))
	}
	if tids, err := Threads(pid); err != nil || !slices.Equal(tids, []int{pid}) {
		t.Errorf("Threads returns %v, %v", tids, err)
	}
	status, err := StatusOf(pid)
	if err != nil || status.Ended() || status.Tracer() != 0 || status.Parent() != os.Getpid() || status.Process() != pid || status.Field("Nothing") != "" {
		t.Errorf("the status is %s, %v", status, err)
	}
}

// A process works when it touches fresh memory, long before the kernel counts a hundredth of a second.
// One that sleeps does not.
func TestWork(t *testing.T) {
	work := func(pid int) uint64 {
		t.Helper()
		n, err := Work(pid)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	const pages = 1000
	mem, err := unix.Mmap(-1, 0, pages*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err == nil {
		err = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	before := work(os.Getpid())
	for at := 0; at < len(mem); at += os.Getpagesize() {
		mem[at] = 1
	}
	if did := work(os.Getpid()) - before; did < pages {
		t.Errorf("%d pages were touched, and the work grew by %d", pages, did)
	}
	pid := sleeper(t)
	did := uint64(1)
	for try := 0; did != 0 && try < 20; try++ { // until it has begun to sleep
		before = work(pid)
		time.Sleep(100 * time.Millisecond)
		did = work(pid) - before
	}
	if did != 0 {
		t.Errorf("a process that sleeps worked %d", did)
	}
	if _, err := Work(nobody); !Ended(err) {
		t.Errorf("Work of nobody returns %v", err)
	}
}

func TestNobody(t *testing.T) {
	if got := Describe(nobody); got != strconv.Itoa(nobody) {
		t.Errorf("Describe returns %q", got)
	}
	if status, err := StatusOf(nobody); !Ended(err) || status.Ended() || status.Parent() != 0 {
		t.Errorf("the status is %q, %v", status, err)
	}
	for name, read := range map[string]func(int) error{
		"Threads":   func(pid int) error { _, err := Threads(pid); return err },
		"Arguments": func(pid int) error { _, err := Arguments(pid); return err },
		"Maps":      func(pid int) error { _, err := Maps(pid, AllMappings); return err },
	} {
		if err := read(nobody); !Ended(err) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestHasOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if open, err := HasOpen(os.Getpid(), path); err != nil || !open {
		t.Errorf("open: %v, %v", open, err)
	}
	file.Close()
	if open, err := HasOpen(os.Getpid(), path); err != nil || open {
		t.Errorf("closed: %v, %v", open, err)
	}
	if _, err := HasOpen(-1, path); !Ended(err) {
		t.Errorf("of nobody: %v", err)
	}
}

func TestMemAvailable(t *testing.T) {
	for _, test := range []struct {
		text  string
		want  uint64
		known bool
	}{
		{"MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n", 8 << 30, true},
		{"MemTotal: 1 kB\n", 0, false},
		{"MemAvailable: many kB\n", 0, false},
		{"", 0, false},
	} {
		if got, known := ParseMemAvailable([]byte(test.text)); got != test.want || known != test.known {
			t.Errorf("%q: got %d, %v", test.text, got, known)
		}
	}
}

// family starts a shell that starts a child of its own, and returns the
// pids of both.
func family(t *testing.T) (parent, child int) {
	t.Helper()
	cmd := exec.Command("sh", "-c", "sleep 1000 & echo $!; wait")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 32)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	if child, err = strconv.Atoi(strings.TrimSpace(string(line[:n]))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, pid := range []int{child, cmd.Process.Pid} {
			if p, err := os.FindProcess(pid); err == nil {
				_ = p.Kill()
			}
		}
		cmd.Wait()
	})
	return cmd.Process.Pid, child
}

func TestNotBelow(t *testing.T) {
	init, child := family(t)
	other, grandchild := family(t)
	for _, test := range []struct {
		name string
		pids []int
		want []int
	}{
		{"none", nil, nil},
		{"alone", []int{init}, nil},
		{"with a child", []int{init, child}, nil},
		{"with a guest", []int{init, child, other}, []int{other}},
		{"with a guest and its child", []int{grandchild, init, other}, []int{grandchild, other}},
		{"with one that has ended", []int{init, nobody}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := NotBelow(init, test.pids)
			if err != nil || !slices.Equal(got, test.want) {
				t.Errorf("got %v, error %v; want %v", got, err, test.want)
			}
		})
	}
}

// Copies of a descriptor are one file, and each other file is its own.
func TestCopies(t *testing.T) {
	files, copies := make(map[int]string), make(map[int][]int)
	for range 3 {
		var pipe [2]int
		if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		for _, fd := range pipe {
			defer unix.Close(fd)
			files[fd], copies[fd] = "pipe", []int{fd}
			for range 5 {
				other, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Close(other)
				files[other], copies[fd] = "pipe", append(copies[fd], other)
			}
		}
	}
	groups := Copies(os.Getpid(), files)
	if len(groups) != len(copies) {
		t.Errorf("%d files, want %d", len(groups), len(copies))
	}
	for _, group := range groups {
		if !slices.Equal(group, copies[group[0]]) {
			t.Errorf("the copies of %d are %d, want %d", group[0], group, copies[group[0]])
		}
	}
	if got := Copies(1<<30, map[int]string{3: "", 1: ""}); len(got) != 2 || got[0][0] != 1 {
		t.Errorf("of no process: %d", got)
	}
}

// Processes that were handed one open file share it; those that opened the same path do not.
func TestSameFile(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var pids []int
	for range 2 {
		cmd := exec.Command("sleep", "1000") // its standard input is /dev/null, opened anew
		cmd.ExtraFiles = []*os.File{f}       // as descriptor 3
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Wait()
		defer cmd.Process.Kill()
		pids = append(pids, cmd.Process.Pid)
	}
	for fd, want := range map[int]bool{0: false, 3: true, 99: false} {
		if got := SameFile(pids[0], pids[1], fd); got != want {
			t.Errorf("descriptor %d is the same file: %v", fd, got)
		}
	}
	if files, err := OpenFiles(pids[0], "/none", os.DevNull); err != nil || files[0] != os.DevNull || files[3] != os.DevNull {
		t.Errorf("open files %v, %v", files, err)
	}
}

func TestKilled(t *testing.T) {
	for text, want := range map[string]bool{
		"SigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n": false,
		"SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n": true,
		"SigPnd:\t0000000000000000\nShdPnd:\t0000000000004100\n": true,
		"SigPnd:\t0000000000004000\nShdPnd:\t0000000000000000\n": false, // SIGTERM
		"": false,
	} {
		if got := Status(text).Killed(); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// The threads of a process have one address space; a process and its parent have two.
func TestSharesMemory(t *testing.T) {
	tids, err := Threads(os.Getpid())
	if err != nil || len(tids) < 2 {
		t.Fatal(tids, err)
	}
	if !SharesMemory(os.Getpid(), tids[len(tids)-1]) {
		t.Error("a process does not share the memory of its thread")
	}
	if SharesMemory(os.Getpid(), os.Getppid()) {
		t.Error("a process shares the memory of its parent")
	}
	if SharesMemory(os.Getpid(), 1<<30) {
		t.Error("a process shares the memory of none")
	}
}
