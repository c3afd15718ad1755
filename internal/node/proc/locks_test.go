// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
)

const locksText = `1: FLOCK  ADVISORY  WRITE 31495 fe:00:10094954 0 EOF
2: LEASE  BREAKING  UNLCK 4674 fe:00:10002546 0 EOF
6: POSIX  ADVISORY  READ 4674 00:1b:10002514 10 19
6: -> POSIX  ADVISORY  WRITE 4676 fe:00:10002514 15 15
9: OFDLCK ADVISORY  WRITE -1 fe:00:10002482 5 9
`

func TestParseLocks(t *testing.T) {
	want := []Lock{
		{"FLOCK", "ADVISORY", "WRITE", 31495, "fe:00", 10094954, 0, "EOF"},
		{"LEASE", "BREAKING", "UNLCK", 4674, "fe:00", 10002546, 0, "EOF"},
		{"POSIX", "ADVISORY", "READ", 4674, "00:1b", 10002514, 10, "19"},
		{"OFDLCK", "ADVISORY", "WRITE", -1, "fe:00", 10002482, 5, "9"},
	}
	if got, err := parse(locksText); err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
	for _, text := range []string{"x\n", "1: FLOCK ADVISORY WRITE x fe:00:1 0 EOF\n", "1: FLOCK ADVISORY WRITE 1 1x 0 EOF\n", "1: FLOCK ADVISORY WRITE 1 fe:00:1 x EOF\n"} {
		if got, err := parse(text); err == nil {
			t.Errorf("%q: got %v", text, got)
		}
	}
}

// What the kernel lists of a file, and of all, is read as it is.
func TestLocks(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err == nil {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_SH)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	of, err := FileLocks(os.Getpid(), int(f.Fd()))
	if err != nil || len(of) != 1 || of[0].Kind != "FLOCK" || of[0].Type != "READ" || of[0].PID != os.Getpid() {
		t.Fatalf("the file has %v, %v", of, err)
	}
	if all, err := Locks(func(l *Lock) bool { return l.PID == os.Getpid() }); err != nil || !slices.Contains(all, of[0]) {
		t.Errorf("the machine has %v, %v", all, err)
	}
}

// What is read is what is there: each lock has a line of its own.
func FuzzLocks(f *testing.F) {
	f.Add(locksText)
	f.Fuzz(func(t *testing.T, text string) {
		locks, err := parse(text)
		if err == nil && len(locks)+strings.Count(text, "->") < strings.Count(text, "\n") {
			t.Errorf("%q has %v", text, locks)
		}
	})
}

func parse(text string) ([]Lock, error) {
	return parseLocks(strings.NewReader(text), len(text)+1, func(*Lock) bool { return true })
}
