// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package sequence

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

// openFiles returns how many files this process has open, without the one that counts them.
func openFiles(t *testing.T) int {
	t.Helper()
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(dir) - 1
}

// A step finds that no file can be opened any more. The way back can start a program all the same.
// After it no file is open that was not before.
func TestWayBackWithoutFiles(t *testing.T) {
	if os.Getenv("GPUCKPT_TEST_CHILD") == "" { // the limit would be that of all other tests
		cmd := exec.Command(os.Args[0], "-test.run=^TestWayBackWithoutFiles$", "-test.v")
		node := filepath.Join(t.TempDir(), "config.toml")
		if err := os.WriteFile(node, fmt.Appendf(nil, "log_dir = %q\n", t.TempDir()), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd.Env = append(os.Environ(), "GPUCKPT_TEST_CHILD=1", config.Env+"="+node)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	if err := exec.Command("true").Run(); err != nil { // the runtime's own files stay open from here on
		t.Fatal(err)
	}
	before := openFiles(t)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	runs := func(ctx context.Context) error { return exec.CommandContext(ctx, "true").Run() }
	q := New("checkpoint", "id")
	err := q.Run(t.Context(), Step{
		Name: "pause", Do: func(context.Context) (uint64, error) { return 0, nil },
		Back: "resume", Undo: runs,
	}, Step{
		Name: "fails", Do: func(ctx context.Context) (uint64, error) {
			if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(openFiles(t)), Max: limit.Max}); err != nil {
				return 0, err
			}
			return 0, runs(ctx)
		},
	})
	if !errors.Is(err, unix.EMFILE) || q.Stuck != nil {
		t.Errorf("error %v, of the way back %v; want the first to be %v", err, q.Stuck, unix.EMFILE)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if after := openFiles(t); after != before {
		t.Errorf("%d files are open, %d were before", after, before)
	}

	// A sequence that succeeds holds them until it is saved.
	q = New("restore", "id")
	if err := q.Run(t.Context(), Step{Name: "a", Do: func(context.Context) (uint64, error) { return 0, nil }}); err != nil {
		t.Fatal(err)
	}
	if held := openFiles(t) - before; held != spareDescriptors {
		t.Errorf("%d descriptors are held, want %d", held, spareDescriptors)
	}
	q.Save(t.Context(), t.TempDir())
	if after := openFiles(t); after != before {
		t.Errorf("%d files are open after the end, %d were before", after, before)
	}
}
