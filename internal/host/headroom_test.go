// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"math"
	"os"
	"path/filepath"
	"testing"

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
