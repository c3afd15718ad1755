// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// hostile builds a C library of a program's own, which the driver's thread runs, and returns its path.
func hostile(t *testing.T, source string) string {
	t.Helper()
	library := filepath.Join(t.TempDir(), "hostile.so")
	if out, err := exec.Command("gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return library
}

// lent returns the shared mappings that a process has of files without a name, and the memory of these.
func lent(t *testing.T, pid int) (mappings int, bytes int64) {
	t.Helper()
	all, err := proc.Maps(pid, func(*proc.Mapping) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if !strings.HasSuffix(m.Path, " (deleted)") || m.Permissions != "rw-s" || strings.HasPrefix(m.Path, "/memfd:softcuda") {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, m.Start, m.End), &st); err != nil {
			t.Fatal(err)
		}
		t.Logf("%x-%x %s: %d bytes", m.Start, m.End, m.Path, st.Blocks*512)
		mappings, bytes = mappings+1, bytes+st.Blocks*512
	}
	return mappings, bytes
}

// A program that keeps mappings of what it was lent has no memory by them.
func TestWhatIsLentIsGivenUp(t *testing.T) {
	if !steer.CanSteer {
		t.Skip("areas are lent where processes can be steered")
	}
	library := hostile(t, "testdata/hold.c")
	for _, test := range []struct {
		name, fault string
		dir         func(*testing.T) string
	}{
		{"restored", "", diskDir},
		{"memory only", "", func(*testing.T) string { return "" }},
		{"refused", "fail=checkpoint:304", diskDir},
		{"refused, to a tmpfs", "fail=checkpoint:304", memoryDir},
	} {
		t.Run(test.name, func(t *testing.T) {
			faults := filepath.Join(t.TempDir(), "faults")
			if err := os.WriteFile(faults, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			w := startWork(t, "12M", "LD_PRELOAD="+library, "SOFTCUDA_CONF="+faults)
			had, _ := lent(t, w.pid)
			for round := range 2 {
				if err := os.WriteFile(faults, []byte(test.fault), 0o600); err != nil {
					t.Fatal(err)
				}
				s, dir := w.lock(), test.dir(t)
				if err := s.Preflight(t.Context(), dir); err != nil {
					t.Fatal(err)
				}
				if _, err := s.Save(t.Context(), dir, Suspended); (err != nil) != (test.fault != "") {
					t.Fatal(err)
				}
				if n, bytes := lent(t, w.pid); n != had+round+1 || bytes < 12<<20 {
					t.Errorf("the program keeps %d mappings with %d bytes, and was to keep one more", n, bytes)
				}
				if err := s.RestoreInPlace(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := s.Unlock(t.Context()); err != nil {
					t.Fatal(err)
				}
				if _, bytes := lent(t, w.pid); bytes > 0 {
					t.Errorf("the program keeps %d bytes", bytes)
				}
				w.verify()
				s.Close()
			}
		})
	}
}
