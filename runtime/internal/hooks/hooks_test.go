// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hooks

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

func TestRead(t *testing.T) {
	const before, after, restored = "dev.gpuckpt.hook.before-checkpoint", "dev.gpuckpt.hook.after-checkpoint", "dev.gpuckpt.hook.after-restore"
	const timeout = "dev.gpuckpt.hook.timeout"
	for _, test := range []struct {
		annotations map[string]string
		want        Hooks
		err         string
	}{
		{map[string]string{"other": "x"}, Hooks{}, ""},
		{
			map[string]string{before: `["sh","-c","a 'b'"]`, after: "wake up", restored: "signal:SIGUSR1", timeout: "5s", restored + ".on-failure": "refuse"},
			Hooks{
				&Hook{Name: "before-checkpoint", Command: []string{"sh", "-c", "a 'b'"}, Timeout: 5 * time.Second, Refuse: true},
				&Hook{Name: "after-checkpoint", Command: []string{"wake", "up"}, Timeout: 5 * time.Second},
				&Hook{Name: "after-restore", Signal: unix.SIGUSR1, Timeout: 5 * time.Second, Refuse: true},
			}, "",
		},
		{map[string]string{timeout: "5s"}, Hooks{}, ""},
		{map[string]string{restored: "x", restored + ".on-failure": "log"}, Hooks{AfterRestore: &Hook{Name: "after-restore", Command: []string{"x"}, Timeout: defaultTimeout}}, ""},
		{map[string]string{"dev.gpuckpt.hook.before": "x"}, Hooks{}, "only the hooks after-checkpoint, after-restore, before-checkpoint"},
		{map[string]string{before: "x", before + ".timeout": "1s"}, Hooks{}, "and beside them timeout and after-restore.on-failure"},
		{map[string]string{restored + ".on-failure": "log"}, Hooks{}, "no annotation " + restored},
		{map[string]string{before: "x", timeout: "1"}, Hooks{}, "a time, such as"},
		{map[string]string{before: "x", timeout: "-1s"}, Hooks{}, "a time, such as"},
		{map[string]string{before: "x", timeout: "1000h"}, Hooks{}, "at most the 10m0s of the node's hook_timeout"},
		{map[string]string{restored: "x", restored + ".on-failure": "ignore"}, Hooks{}, `"refuse" or "log"`},
		{map[string]string{after: "x", after + ".on-failure": "refuse"}, Hooks{}, "only the hooks"},
		{map[string]string{before: " "}, Hooks{}, "must be a command"},
		{map[string]string{before: "[]"}, Hooks{}, "must be a command"},
		{map[string]string{before: `["a",1]`}, Hooks{}, "must be a command"},
		{map[string]string{before: "signal:USR1"}, Hooks{}, `no signal is called "USR1"`},
	} {
		got, err := Read(test.annotations, 10*time.Minute)
		if test.err != "" {
			if !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), test.err) {
				t.Errorf("%v: error %v, want %q", test.annotations, err, test.err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%v: got %+v, %v", test.annotations, got, err)
		}
	}
}

// fake is a program whose commands do as it says.
type fake struct {
	status int
	output string
	err    error
	hangs  bool
	got    []string
}

func (f *fake) Run(ctx context.Context, command []string) (int, string, error) {
	f.got = command
	if f.hangs {
		<-ctx.Done()
	}
	return f.status, f.output, f.err
}

func (f *fake) Signal(_ context.Context, signal unix.Signal) error {
	f.got = []string{unix.SignalName(signal)}
	return f.err
}

func TestTell(t *testing.T) {
	command := Hook{Name: "before-checkpoint", Command: []string{"sleep", "--level", "1"}, Timeout: 20 * time.Millisecond, Refuse: true}
	signal := Hook{Name: "after-restore", Signal: unix.SIGUSR1, Timeout: time.Minute, Refuse: true}
	for _, test := range []struct {
		hook    Hook
		program fake
		is      error
		says    string
	}{
		{command, fake{}, nil, ""},
		{signal, fake{}, nil, ""},
		{command, fake{status: 3, output: "no such level\n"}, errdefs.ErrFailedPrecondition, `hook before-checkpoint: run "sleep --level 1" in the container (its output ends with "no such level"): it ended with status 3`},
		{command, fake{status: 137}, errdefs.ErrFailedPrecondition, "it was killed: the container's own program has ended"},
		{command, fake{err: os.ErrNotExist}, os.ErrNotExist, "hook before-checkpoint"},
		{command, fake{hangs: true}, context.DeadlineExceeded, "longer than 20ms"},
		{signal, fake{err: os.ErrNotExist}, os.ErrNotExist, "send SIGUSR1"},
	} {
		err := test.hook.Tell(t.Context(), &test.program)
		if test.is == nil && err != nil || test.is != nil && (!errors.Is(err, test.is) || !strings.Contains(err.Error(), test.says)) {
			t.Errorf("%+v: got %v", test.program, err)
		}
		if len(test.program.got) == 0 {
			t.Errorf("%+v: the program has heard nothing", test.hook)
		}
		test.hook.Refuse = false
		if err := test.hook.Tell(t.Context(), &test.program); err != nil {
			t.Errorf("%+v, logged: got %v", test.program, err)
		}
	}
	if err := (*Hook)(nil).Tell(t.Context(), nil); err != nil {
		t.Error(err)
	}
}

func noteIn(t *testing.T, root string) (n Note) {
	t.Helper()
	path := filepath.Join(root, run, noteDir, noteName)
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &n)
	}
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o444 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	return n
}

func TestWriteNote(t *testing.T) {
	root := t.TempDir()
	seen := make(map[string]bool)
	for i := 1; i <= 3; i++ {
		wrote, err := writeNote(root, nil)
		if err != nil {
			t.Fatal(err)
		}
		if n := noteIn(t, root); n.Restores != i || len(n.ID) != 32 || seen[n.ID] || n != wrote || time.Since(n.Time) > time.Minute {
			t.Errorf("restore %d: %+v, wrote %+v", i, n, wrote)
		} else {
			seen[n.ID] = true
		}
	}
	// What the program has written there is not trusted.
	for _, text := range []string{"{", `{"restores":-5}`, `{"restores":99999999999999}`, strings.Repeat(" ", maxNote) + `{"restores":7}`} {
		path := filepath.Join(root, run, noteDir, noteName)
		if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		if n, err := writeNote(root, nil); err != nil || n.Restores != 1 {
			t.Errorf("%q: %+v, %v", text, n, err)
		}
	}
}

// TestNoteOfAnotherKind puts something else than a file there: to open it, by the host's rights, starts a watchdog or rewinds a
// tape, and to read it may have no end.
func TestNoteOfAnotherKind(t *testing.T) {
	for kind, mode := range map[string]uint32{"a FIFO": unix.S_IFIFO, "a device": unix.S_IFCHR} {
		root := t.TempDir()
		if _, err := writeNote(root, nil); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(root, run, noteDir, noteName)
		if err := errors.Join(os.Remove(path), unix.Mknod(path, mode|0o666, int(unix.Mkdev(1, 3)))); err != nil {
			t.Fatal(err)
		}
		events, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
		if err == nil {
			_, err = unix.InotifyAddWatch(events, path, unix.IN_OPEN)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(events)
		if n, err := writeNote(root, nil); err != nil || n.Restores != 1 || noteIn(t, root) != n {
			t.Errorf("%s: %+v, %v", kind, n, err)
		}
		event := make([]byte, 256)
		n, err := unix.Read(events, event)
		if n > 0 && binary.NativeEndian.Uint32(event[4:])&unix.IN_OPEN != 0 {
			t.Errorf("%s was opened", kind)
		} else if n < 0 && !errors.Is(err, unix.EAGAIN) {
			t.Error(err)
		}
	}
}

func TestRemoveNote(t *testing.T) {
	root, outside := t.TempDir(), t.TempDir()
	for range 2 { // and where there is none
		if err := removeNote(root); err != nil {
			t.Fatal(err)
		}
		if _, err := writeNote(root, nil); err != nil {
			t.Fatal(err)
		}
		if err := removeNote(root); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(filepath.Join(root, run, noteDir, noteName)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("it is there: %v", err)
		}
	}
	// The image's author chose what is there.
	kept := filepath.Join(outside, noteName)
	if err := errors.Join(os.WriteFile(kept, nil, 0o600), os.Remove(filepath.Join(root, run, noteDir)), os.Symlink(outside, filepath.Join(root, run, noteDir))); err != nil {
		t.Fatal(err)
	}
	if err := removeNote(root); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
}

func TestWriteNoteElsewhere(t *testing.T) {
	outside := t.TempDir()
	for name, make := range map[string]func(root string) error{
		"a link below run": func(root string) error {
			return errors.Join(os.Mkdir(filepath.Join(root, run), 0o755), os.Symlink(outside, filepath.Join(root, run, noteDir)))
		},
		"a file": func(root string) error {
			return errors.Join(os.Mkdir(filepath.Join(root, run), 0o755), os.WriteFile(filepath.Join(root, run, noteDir), nil, 0o600))
		},
		"a link out of the root": func(root string) error { return os.Symlink("../../../../../../.."+outside, filepath.Join(root, run)) },
	} {
		root := t.TempDir()
		if err := make(root); err != nil {
			t.Fatal(err)
		}
		if n, err := writeNote(root, nil); err == nil {
			t.Errorf("%s: wrote %+v", name, n)
		}
		if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
			t.Errorf("%s: outside: %v, %v", name, entries, err)
		}
	}
	// On /run there is the container's tmpfs, or a volume.
	root := t.TempDir()
	at := filepath.Join(root, run)
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	for spec, ok := range map[*specs.Spec]bool{
		{Mounts: []specs.Mount{{Destination: "/run/", Type: "tmpfs"}}}: true,
		{Mounts: []specs.Mount{{Destination: "/run", Type: "bind"}}}:   false,
		{}: false,
	} {
		if _, err := writeNote(root, spec); (err == nil) != ok {
			t.Errorf("mounts %v: %v", spec.Mounts, err)
		}
	}
}
