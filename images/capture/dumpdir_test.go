// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// The dump of a command that was killed is removed by the next one, that of one
// that lives is not.
func TestMakeDumpDir(t *testing.T) {
	in := t.TempDir()
	left, other := filepath.Join(in, dumpPrefix+"killed"), filepath.Join(in, "mine")
	for _, dir := range []string{left, other} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "gpu-1-0"), []byte("state"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	var dirs []string
	var releases []func() error
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			dir, release, err := makeDumpDir(in, 0)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			dirs, releases = append(dirs, dir), append(releases, release)
		})
	}
	all.Wait()
	want := append(slices.Clone(dirs), other)
	slices.Sort(want)
	if got := list(t, in); !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
	for _, release := range releases {
		if err := release(); err != nil {
			t.Error(err)
		}
	}
	if got := list(t, in); !slices.Equal(got, []string{other}) {
		t.Errorf("left: %q", got)
	}
}

// A dump in memory is on a tmpfs of that size, which nothing of another dump takes away, and is gone with it.
// What a program that was killed has left mounted goes as well.
func TestMakeDumpDirInMemory(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	in := t.TempDir()
	left := filepath.Join(in, dumpPrefix+"killed")
	if err := os.Mkdir(left, 0o700); err != nil {
		t.Fatal(err)
	}
	mountMemory(left, 1<<20)
	t.Cleanup(func() { _ = unix.Unmount(left, unix.MNT_DETACH) })
	const size = 5 << 20
	dir, release, err := makeDumpDir(in, size)
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Type != unix.TMPFS_MAGIC || st.Blocks*uint64(st.Bsize) != size {
		t.Errorf("%s is %#x with %d bytes, %v", dir, st.Type, st.Blocks*uint64(st.Bsize), err)
	}
	if err := os.WriteFile(filepath.Join(dir, "gpu-1-0"), []byte("state"), 0o600); err != nil {
		t.Fatal(err)
	}
	other, releaseOther, err := makeDumpDir(in, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "gpu-1-0")); err != nil {
		t.Errorf("the next dump has taken it away: %v", err)
	}
	if got, want := list(t, in), []string{dir, other}; !slices.Equal(got, want) && !slices.Equal(got, []string{other, dir}) {
		t.Errorf("there are %q, want %q", got, want)
	}
	for _, release := range []func() error{release, releaseOther} {
		if err := release(); err != nil {
			t.Error(err)
		}
	}
	if got := list(t, in); len(got) > 0 {
		t.Errorf("left: %q", got)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), in) {
		t.Errorf("mounted still, or %v", err)
	}
}

func TestSharesMounts(t *testing.T) {
	var own unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &own); err != nil {
		t.Fatal(err)
	}
	self := uint64(os.Getpid())
	if !sharesMounts(self, own.Ino) || sharesMounts(self, own.Ino+1) || sharesMounts(1<<40, own.Ino) {
		t.Error("not as it should be")
	}
	cmd := exec.Command("unshare", "--mount", "sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for range 500 {
		if !sharesMounts(uint64(cmd.Process.Pid), own.Ino) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("another mount namespace is taken for this one's")
}

func TestHadNoRoom(t *testing.T) {
	for _, test := range []struct {
		err  error
		want bool
	}{
		{nil, false}, {&notDumped{errdefs.ErrFailedPrecondition}, false}, {&notDumped{fmt.Errorf("preflight: %w", errdefs.ErrResourceExhausted)}, true},
		{errors.Join(fmt.Errorf("checkpoint job: %w", &notDumped{unix.ENOSPC}), nil), true},
		{&notDumped{errors.New("CRIU: Can't write: No space left on device")}, true}, {unix.ENOSPC, false}, // of the image
	} {
		if got := hadNoRoom(test.err); got != test.want {
			t.Errorf("%v: %v", test.err, got)
		}
	}
}

func list(t *testing.T, in string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(in, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}
