// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A container that is left running goes on when CRIU is done, not when the disk
// is: here the files' second writer, after that beside the driver, waits.
func TestGoesOnBeforeTheDisk(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
	k.Expect(t, "verify", "bad=0")
	dir := harness.DiskDir(t)
	first := 0
	waits, let := holdOpens(t, dir, func(name string, pid int) bool {
		if first == 0 && images.IsAreaFile(name) {
			first = pid
		}
		return images.IsAreaFile(name) && pid != first
	})
	done := make(chan error, 1)
	go func() { done <- checkpointTask(t, shared, k, dir) }()
	select {
	case <-waits:
	case err := <-done:
		t.Fatalf("nothing was written after the driver's end; %v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "verify", "bad=0") // the program runs
	select {
	case err := <-done:
		t.Fatalf("the checkpoint was over before its files were written; %v", err)
	default:
	}
	let()
	if err := <-done; err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	line, err := shared.Timeline(k.ID)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range line.Phases {
		names = append(names, p.Name)
	}
	dump, back := slices.Index(names, "dump"), slices.Index(names, "give GPU state back")
	if dump < 0 || back < dump {
		t.Errorf("the steps were %q", names)
	}
	k.Expect(t, "verify", "bad=0")
}

// holdOpens makes the programs that open files in a directory wait, each until
// the test lets it: all those whose file's name and process held says. waits gets
// a value for each that has begun to wait. They go on when let is called, which
// the end of the test does too. See fanotify(7).
func holdOpens(t *testing.T, dir string, held func(name string, pid int) bool) (waits <-chan struct{}, let func()) {
	t.Helper()
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_CLOEXEC)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) {
		t.Skipf("opens cannot be held here: fanotify: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	// That of a file which is being read can be closed: a read ends then.
	asked := os.NewFile(uintptr(fd), "fanotify")
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM|unix.FAN_EVENT_ON_CHILD, unix.AT_FDCWD, dir); err != nil {
		asked.Close()
		t.Fatal(err)
	}
	began := make(chan struct{}, 100)
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := asked.Read(buf)
			if err != nil {
				return // closed: the kernel lets all who wait
			}
			events := bytes.NewReader(buf[:n])
			for events.Len() > 0 {
				var e unix.FanotifyEventMetadata
				if binary.Read(events, binary.NativeEndian, &e) != nil {
					return
				}
				// The number names the question until it is answered.
				file := os.NewFile(uintptr(e.Fd), "opened")
				name, _ := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(e.Fd)))
				if held(filepath.Base(name), int(e.Pid)) {
					began <- struct{}{}
					defer file.Close()
					continue
				}
				answer := unix.FanotifyResponse{Fd: e.Fd, Response: unix.FAN_ALLOW}
				if err := binary.Write(asked, binary.NativeEndian, answer); err != nil {
					t.Error(err)
				}
				file.Close()
			}
		}
	}()
	let = func() { asked.Close() }
	t.Cleanup(let)
	return began, let
}
