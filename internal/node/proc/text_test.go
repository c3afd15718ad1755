// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// memoryMap is struct prctl_mm_map of linux/prctl.h: code, data, heap, stack, arguments, environment.
type memoryMap struct {
	at     [11]uint64
	_      uint64
	_, exe uint32
}

// A program names 64 MiB of its memory its environment: no more of it is read than any program has.
func TestEnvironmentIsBounded(t *testing.T) {
	fields, err := stat(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var m memoryMap
	for i, number := range []int{26, 27, 45, 46, 47, 0, 28, 48, 49, 50, 51} { // of proc_pid_stat(5)
		if number == 0 {
			brk, _, _ := unix.RawSyscall(unix.SYS_BRK, 0, 0, 0)
			m.at[i] = uint64(brk)
		} else if m.at[i], err = strconv.ParseUint(fields[number], 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	m.exe = ^uint32(0)
	area, err := unix.Mmap(-1, 0, 4*mostText, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(area)
	set := func(m memoryMap) error {
		return unix.Prctl(unix.PR_SET_MM, unix.PR_SET_MM_MAP, uintptr(unsafe.Pointer(&m)), unsafe.Sizeof(m), 0)
	}
	was := m
	m.at[9] = uint64(uintptr(unsafe.Pointer(&area[0])))
	if err := set(m); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := set(was); err != nil {
			t.Error(err)
		}
	}()
	if env, err := Environment(os.Getpid()); !errors.Is(err, ErrTooMuch) {
		t.Errorf("%d texts, %v", len(env), err)
	}
}

func TestTextsAreBounded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mountinfo")
	for size, refused := range map[int64]bool{0: false, mostText: false, mostText + 1: true} {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(file, size); err != nil {
			t.Fatal(err)
		}
		if text, err := Text(file); errors.Is(err, ErrTooMuch) != refused || !refused && int64(len(text)) != size {
			t.Errorf("%d bytes: %d, %v", size, len(text), err)
		}
		if text, err := Head(file); err != nil || len(text) > 4096 {
			t.Errorf("the begin has %d bytes, %v", len(text), err)
		}
	}
	const watch = "inotify wd:1 ino:2 sdev:3 mask:4\n"
	for n, refused := range map[int]bool{1: false, mostText / 16: true} {
		if lines, err := behind(strings.NewReader("pos:\t0\n"+strings.Repeat(watch, n)), "inotify "); errors.Is(err, ErrTooMuch) != refused || !refused && len(lines) != n {
			t.Errorf("%d of %d lines, %v", len(lines), n, err)
		}
	}
	b := Bound(0)
	if err := b.Take("name"); err != nil {
		t.Error(err)
	}
	if err := b.Take(string(make([]byte, mostText))); !errors.Is(err, ErrTooMuch) {
		t.Errorf("names are kept without end: %v", err)
	}
}

// A directory with more entries than are read of any is refused.
func TestNamesAreBounded(t *testing.T) {
	names, err := Names("/proc/self/fd")
	if err != nil || len(names) < 3 {
		t.Fatal(names, err)
	}
	if some, err := namesOf("/proc/self/fd", len(names)-1); !errors.Is(err, ErrTooMuch) {
		t.Errorf("%d of %d names, %v", len(some), len(names), err)
	}
}
