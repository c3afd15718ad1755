// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

// targetEnv makes the test's executable a target: a process whose first
// thread maps areas as the driver's thread does.
const targetEnv = "GPUCKPT_TEST_TARGET"

func init() {
	if os.Getenv(targetEnv) != "" {
		runtime.LockOSThread() // the first thread serves the orders
	}
}

// killFile names the step at which a tracer of this test's process dies.
func killFile(parent int) string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("gpuckpt-trace-kill-%d", parent))
}

// asTold is how this tracer works: as the tests need it, and as the one at hand says.
// It lets system calls by in the areas of tests, and throttles the large ones.
func asTold() tuning {
	how := usualTuning()
	how.untracedArea, how.untracedLeft, how.throttledArea = 4<<20, 2<<20, largeBytes
	dieAtStep(&how)
	fillAsTold(how.filler)
	return how
}

// dieAtStep makes this tracer kill itself after as many steps as the test says.
func dieAtStep(how *tuning) {
	b, err := os.ReadFile(killFile(os.Getppid()))
	if err != nil {
		return
	}
	n, err := strconv.Atoi(string(b))
	if err != nil {
		panic(err)
	}
	var left atomic.Int64 // steps are taken by several threads
	left.Store(int64(n))
	how.step = func(string) {
		if left.Add(-1) < 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	how.filler.Step = how.step
}

// largeBytes is an area that is filled while the target writes to it.
const largeBytes = 256 << 20

// wanderFile is there when a tracer of this test's process is to be a busy one.
func wanderFile(parent int) string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("gpuckpt-trace-wander-%d", parent))
}

// wanderAsTold has this tracer's first goroutine make way for others until it goes on
// on another thread than the process's first, which ends the tracer.
func wanderAsTold() {
	if _, err := os.Stat(wanderFile(os.Getppid())); err != nil {
		return
	}
	var end atomic.Bool
	defer end.Store(true)
	for range 4 * runtime.GOMAXPROCS(0) {
		go func() {
			for !end.Load() {
			}
		}()
	}
	for range 20 {
		runtime.Gosched()
		if unix.Gettid() != os.Getpid() {
			fmt.Fprintln(os.Stderr, "the first goroutine has left the first thread")
			os.Exit(1)
		}
	}
}

// fillFile tells a tracer of this test's process how filling goes: "hold BYTES"
// to wait there while the file exists, "fail BYTES" to fail there.
func fillFile(parent int) string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("gpuckpt-trace-fill-%d", parent))
}

// fillAsTold makes this tracer fill as the test says.
func fillAsTold(filler *staging.Filler) {
	path := fillFile(os.Getppid())
	b, err := os.ReadFile(path)
	if err != nil {
		return
	}
	var what string
	var at uint64
	if _, err := fmt.Sscan(string(b), &what, &at); err != nil {
		panic(err)
	}
	filler.Fill = func(from uint64) error {
		if from < at {
			return nil
		}
		if what == "fail" {
			return syscall.ENOSPC
		}
		for _, err := os.Stat(path); err == nil; _, err = os.Stat(path) {
			time.Sleep(time.Millisecond)
		}
		return nil
	}
}

// beTarget answers orders on standard input, one a line, all in the first
// thread: "map BYTES FLAGS" maps and fills an area, "sum" adds it up, "set AT
// VALUE" and "clear AT BYTES" change it, "child SIGNAL" makes a child that counts, and "busy" has another thread map memory. Another thread computes with vector registers meanwhile,
// a fifth of the time: many targets run at once, and the machine has other tests.
func beTarget() {
	go func() {
		for ; ; time.Sleep(4 * time.Millisecond) {
			for began := time.Now(); time.Since(began) < time.Millisecond; {
				x := 1.0
				for i := 1; i <= 1000; i++ {
					x = x*1.0000001 + float64(i)
				}
				if x != x || x < 1 {
					fmt.Println("arithmetic broke")
					os.Exit(3)
				}
			}
		}
	}()
	var area []byte
	page, err := unix.Mmap(-1, 0, staging.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		panic(err)
	}
	counter := (*atomic.Uint64)(unsafe.Pointer(&page[0]))
	buf := make([]byte, 256)
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, 0, uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
		if errno != 0 || n == 0 {
			if errno == unix.EINTR {
				fmt.Println("EINTR")
				os.Exit(4)
			}
			os.Exit(0)
		}
		f := strings.Fields(string(buf[:n]))
		switch f[0] {
		case "map":
			size, _ := strconv.Atoi(f[1])
			flags, _ := strconv.Atoi(f[2])
			at, _, errno := unix.RawSyscall6(unix.SYS_MMAP, 0, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, uintptr(flags), ^uintptr(0), 0)
			if errno != 0 {
				fmt.Println("mmap", errno)
				continue
			}
			size = (size + staging.PageSize - 1) &^ (staging.PageSize - 1)
			area = unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(nil), at)), size)
			fill(area)
			fmt.Printf("%x\n", at)
		case "sum":
			fmt.Println(sumOf(area))
		case "set":
			at, _ := strconv.Atoi(f[1])
			value, _ := strconv.Atoi(f[2])
			area[at] = byte(value)
			fmt.Println("set")
		case "clear":
			at, _ := strconv.Atoi(f[1])
			n, _ := strconv.Atoi(f[2])
			clear(area[at : at+n])
			fmt.Println("cleared")
		case "busy": // another thread maps memory all the time, right below what is mapped
			go func() {
				for range 16 << 20 { // 16 TiB of addresses
					_, _, _ = unix.RawSyscall6(unix.SYS_MMAP, 0, 1<<20, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE, ^uintptr(0), 0)
				}
			}()
			fmt.Println("busy")
		case "child": // SIGNAL: a child that shares all descriptors and counts
			signal, _ := strconv.Atoi(f[1])
			fmt.Println(count(counter, uintptr(signal)))
		case "count":
			fmt.Println(counter.Load())
		case "fds":
			names, _ := os.ReadDir("/proc/self/fd")
			fmt.Println(len(names))
		}
	}
}

// mincore says of each page of a mapping whether it is in memory (mincore(2)).
func mincore(mem, pages []byte) error {
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		return errno
	}
	return nil
}

//go:norace // it would take most of the test's time
func fill(b []byte) {
	for i := range b {
		b[i] = byte(i*7 + i>>12)
	}
}

func sumOf(b []byte) uint64 {
	return uint64(crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// count makes a child that counts until this process ends, and returns its number.
//
//go:norace
func count(counter *atomic.Uint64, signal uintptr) uintptr {
	child, _, errno := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_FILES|signal, 0, 0, 0, 0, 0)
	if errno != 0 {
		return 0
	}
	if child == 0 {
		unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0)
		// Not by Add: the race detector has locks, which another thread may have had as the child was made.
		for at := (*uint64)(unsafe.Pointer(counter)); ; {
			*at++
		}
	}
	return child
}
