// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"golang.org/x/sys/unix"
)

func TestExpected(t *testing.T) {
	b := &bench{runs: []report.Run{
		{Shape: report.Shape{Size: 8, Procs: 1}, Method: report.CRIUPlugin, Whole: 10},
		{Shape: report.Shape{Size: 64, Procs: 1}, Method: report.CRIUPlugin, Whole: 90},
		{Shape: report.Shape{Size: 8, Procs: 1}, Method: report.Ours, Whole: 3, Error: "no"},
		{Shape: report.Shape{Size: 16 << 20, Procs: 1}, Method: report.Ours, Whole: 3},
	}}
	for _, test := range []struct {
		method string
		size   uint64
		want   time.Duration
	}{{report.CRIUPlugin, 16, 20 * time.Second}, {report.CRIUPlugin, 64, 90 * time.Second}, {report.CRIUPlugin, 4, 2 * time.Second}, {report.Ours, 16, 2 * time.Second}, {report.Ours, 16 << 30, 14 * time.Second}, {report.Stock, 16 << 30, 34 * time.Second}} {
		if got := b.expected(report.Shape{Size: test.size, Procs: 1}, test.method).Round(time.Millisecond); got != test.want {
			t.Errorf("%s of %d is expected to take %v, want %v", test.method, test.size, got, test.want)
		}
	}
}

func TestParseMemory(t *testing.T) {
	m, err := parseMemory("MemTotal:       24684256 kB\nMemFree:  1 kB\nMemAvailable:   20 kB\nShmem:    3 kB\nHugePages_Total:       0\n")
	if want := (hostMemory{total: 24684256 << 10, available: 20 << 10, shmem: 3 << 10}); m != want || err != nil {
		t.Errorf("%+v, error %v, want %+v", m, err, want)
	}
	if _, err := parseMemory("MemTotal: 1 kB\n"); err == nil {
		t.Error("a text without the lines was accepted")
	}
}

func TestCgroupPath(t *testing.T) {
	const v1 = "7:memory:/a/b\n5:cpu,cpuacct:/c\n0::/\n"
	for _, test := range []struct {
		text, controller, want string
		ok                     bool
	}{{v1, "memory", "/a/b", true}, {v1, "cpuacct", "/c", true}, {v1, "pids", "", false}, {"0::/x\n", "", "/x", true}} {
		if got, ok := cgroupPath(test.text, test.controller); got != test.want || ok != test.ok {
			t.Errorf("the cgroup of %q in %q is %q, %t, want %q", test.controller, test.text, got, ok, test.want)
		}
	}
}

// What is removed while files are walked through does not count, but the directory itself does.
func TestWalkFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b", "c/d", "e"} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(name), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	seen := 0
	err := walkFiles(dir, func(path string, _ *unix.Stat_t) error {
		if seen++; seen == 1 { // after the directory was listed
			return errors.Join(os.RemoveAll(filepath.Join(dir, "c")), os.Remove(filepath.Join(dir, "b")))
		}
		return nil
	})
	if err != nil || seen != 2 {
		t.Errorf("%d files were seen, %v; want 2", seen, err)
	}
	if err := walkFiles(filepath.Join(dir, "c"), nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of a directory that is not there: %v", err)
	}
}

func TestImageBytes(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "image"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(1<<30), f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
	if got, err := imageBytes(dir); got < 1<<20 || got > 2<<20 || err != nil {
		t.Errorf("%d bytes, error %v, want one MiB: the hole takes no space", got, err)
	}
}

// The sampler sees memory that is taken and given back in between. What other programs give back meanwhile
// hides it: it is tried until none did.
func TestSampler(t *testing.T) {
	const bytes = 64 << 20
	var peak report.MemoryPeak
	for range 20 {
		if peak = sampled(t, bytes); peak.Shmem >= bytes/2 {
			return
		}
	}
	t.Errorf("peak %+v, want some %d bytes of shared memory", peak, bytes)
}

// sampled is the peak while a file of that size was in a tmpfs.
func sampled(t *testing.T, bytes int) report.MemoryPeak {
	s, err := startSampler()
	if err != nil {
		t.Fatal(err)
	}
	dir, remove, err := mountTmpfs(t.TempDir())
	if err != nil {
		t.Skip("a mount needs root: ", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, bytes), 0o600); err != nil {
		t.Error(err)
	}
	time.Sleep(3 * sampleEvery)
	if err := remove(); err != nil {
		t.Error(err)
	}
	peak, err := s.stop()
	if err != nil {
		t.Fatal(err)
	}
	return peak
}

func TestWarmMemory(t *testing.T) {
	if err := warmMemory(3*warmPiece/2 + 4096); err != nil {
		t.Error(err)
	}
}
