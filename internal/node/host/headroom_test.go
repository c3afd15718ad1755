// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	ccgroups "github.com/containerd/cgroups/v3"
	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"
)

func TestHeadroomOf(t *testing.T) {
	cgroups.TestMode = true // files elsewhere than in /sys/fs/cgroup
	t.Cleanup(func() { cgroups.TestMode = false })
	for name, test := range map[string]struct {
		limit, usage, stat string
		want               uint64
	}{
		"room":            {"4096\n", "1000\n", "", 3096},
		"page cache":      {"4096\n", "1000\n", "cache 1\ninactive_file 20\nactive_file 300\ntotal_active_file 4000\nodd\n", 3416},
		"all page cache":  {"4096\n", "1000\n", "inactive_file 2000\nactive_file x\n", 4096},
		"over the limit":  {"4096\n", "5000\n", "", 0},
		"no limit":        {"max\n", "0\n", "", math.MaxUint64},
		"limit is odd":    {"", "1000\n", "", math.MaxUint64},
		"usage is absent": {"4096\n", "", "", math.MaxUint64},
	} {
		dir := t.TempDir()
		for file, text := range map[string]string{"limit": test.limit, "usage": test.usage, "memory.stat": test.stat} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := headroomOf(dir, "limit", "usage", []string{"inactive_file", "active_file"}); got != test.want {
			t.Errorf("%s: got %d, want %d", name, got, test.want)
		}
	}
	if got := headroomOf(filepath.Join(t.TempDir(), "none"), "limit", "usage", nil); got != math.MaxUint64 {
		t.Errorf("no cgroup: got %d", got)
	}
}

// A test may have memory, wherever it runs.
func TestHeadroom(t *testing.T) {
	if room := Headroom(""); room < 1<<20 {
		t.Errorf("%d bytes", room)
	}
}

// A process may have no more than the machine has.
func TestMemoryLimit(t *testing.T) {
	var machine unix.Sysinfo_t
	if err := unix.Sysinfo(&machine); err != nil {
		t.Fatal(err)
	}
	total := machine.Totalram * uint64(machine.Unit)
	if limit := MemoryLimit(os.Getpid()); limit < 1<<20 || limit > total {
		t.Errorf("%d bytes of %d", limit, total)
	}
}

// A limit that is in force is not written again: the kernel refuses it while more is charged, and 20
// checkpoints at once had some refused.
func TestLimitIsSetOnce(t *testing.T) {
	path := fmt.Sprintf("/gpuckpt-test-%d", os.Getpid())
	root, name := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	if ccgroups.Mode() == ccgroups.Unified {
		root, name = unifiedRoot, "memory.max"
	}
	file := filepath.Join(root, path, name)
	t.Cleanup(func() {
		if err := os.Remove(filepath.Dir(file)); err != nil {
			t.Error(err)
		}
	})
	limit := func(bytes int64) {
		t.Helper()
		if _, err := MakeMemoryCgroup(path, bytes); err != nil {
			t.Fatal(err)
		}
		if !isLimit(path, bytes) {
			t.Errorf("the limit is not %d", bytes)
		}
	}
	limit(64 << 20)
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(watch)
	if _, err := unix.InotifyAddWatch(watch, file, unix.IN_MODIFY); err != nil {
		t.Fatal(err)
	}
	written := func() bool {
		n, err := unix.Read(watch, make([]byte, 4096))
		return err == nil && n > 0
	}
	limit(64 << 20)
	if written() {
		t.Error("it was written again")
	}
	limit(32 << 20)
	if !written() {
		t.Error("the test does not see what is written")
	}
}
