// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// mapped puts a control block into this process as an interposer has one, and returns its bytes, which the
// test then changes at will: what a container could do.
func mapped(t *testing.T) []byte {
	t.Helper()
	signal.Ignore(wake)
	t.Cleanup(func() { signal.Reset(wake) })
	f, err := os.Create(filepath.Join(t.TempDir(), LibraryName))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	page, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(page) })
	block := page[2*alignment:]
	copy(block, magic)
	binary.LittleEndian.PutUint32(block[offVersion:], version)
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	binary.LittleEndian.PutUint32(block[offTID:], uint32(unix.Gettid()))
	return block
}

func TestFind(t *testing.T) {
	if c, err := Find(os.Getpid()); c != nil || err != nil {
		t.Fatalf("a process without an interposer has %v, %v", c, err)
	}
	block := mapped(t)
	tid := binary.LittleEndian.Uint32(block[offTID:])
	for _, test := range []struct {
		name       string
		tid        uint32
		version    uint32
		state      state
		none, says bool
	}{
		{name: "an interposer", tid: tid, version: version},
		{name: "without a thread", version: version, none: true},
		{name: "a negative thread", tid: 1 << 31, version: version, none: true},
		{name: "a thread of another process", tid: uint32(os.Getppid()), version: version, none: true, says: true},
		{name: "another version", tid: tid, version: 9, none: true},
		{name: "another version, saved", tid: tid, version: 9, state: saved, none: true, says: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			binary.LittleEndian.PutUint32(block[offTID:], test.tid)
			binary.LittleEndian.PutUint32(block[offVersion:], test.version)
			binary.LittleEndian.PutUint32(block[offState:], uint32(test.state))
			c, err := Find(os.Getpid())
			if (c == nil) != test.none || (err != nil) != test.says {
				t.Errorf("got %+v, %v", c, err)
			}
		})
	}
}

// An interposer that does not answer, or answers what it likes, costs the time that it was given.
func TestAnswers(t *testing.T) {
	block := mapped(t)
	c, err := Find(os.Getpid())
	if err != nil || c == nil {
		t.Fatalf("%v, %v", c, err)
	}
	word := func(at int) uint32 { return binary.LittleEndian.Uint32(block[at:]) }
	if _, err := c.ask(t.Context(), "park", askPark, within(time.Second), time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("not answered: %v", err)
	}
	request := word(offRequest)
	if request%asks != askPark || word(offCancelled) != request || word(offArgument) != 1000 {
		t.Errorf("asked for %#x, cancelled %#x, argument %d", request, word(offCancelled), word(offArgument))
	}
	if _, err := c.ask(t.Context(), "park", askPark, 0, time.Minute); !errors.Is(err, ErrBusy) {
		t.Errorf("busy: %v", err)
	}
	dying := *c
	dying.TID = os.Getppid() // not among its threads
	if _, err := dying.ask(t.Context(), "park", askPark, 0, time.Minute); !proc.Ended(err) {
		t.Errorf("busy, and its thread has ended: %v", err)
	}
	for result, words := range map[uint32]string{notReady: ErrBusy.Error(), 2: "error 2", 1 << 31: "error -2147483648"} {
		binary.LittleEndian.PutUint32(block[offAnswered:], word(offRequest))
		binary.LittleEndian.PutUint32(block[offResult:], result)
		request, err := c.begin(askSave, 0)
		if err != nil {
			t.Fatal(err)
		}
		binary.LittleEndian.PutUint32(block[offAnswered:], request)
		if _, err := c.await(t.Context(), "save", request); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("result %d: %v", result, err)
		}
	}
	// The number of requests begins anew, and none is 0.
	binary.LittleEndian.PutUint32(block[offRequest:], 1<<32-1)
	binary.LittleEndian.PutUint32(block[offAnswered:], 1<<32-1)
	if request, err := c.begin(askOpen, 0); err != nil || request != asks|askOpen {
		t.Errorf("request %#x, %v", request, err)
	}
}

// The offsets are those that the interposer's own assertions name.
func TestLayout(t *testing.T) {
	source, err := os.ReadFile("../../../interposer/worker.c")
	if err != nil {
		t.Fatal(err)
	}
	for field, at := range map[string]int{
		"version": offVersion, "tid": offTID, "state": offState, "request": offRequest, "answered": offAnswered, "result": offResult,
		"argument": offArgument, "cancelled": offCancelled, "peers": offPeers, "start": offStart, "bytes": offBytes, "copiers": offCopiers,
		"cut": offCut, "sharing": offSharing, "count": offCount, "descriptors": offDescriptors, "sizes": offSizes, "in_area": offInArea,
	} {
		if want := fmt.Sprintf("AT(%d, %s);", at, field); !strings.Contains(string(source), want) {
			t.Errorf("worker.c lacks %s", want)
		}
	}
}
