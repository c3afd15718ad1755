// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hooks

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// A hook that is accepted can be run.
func FuzzRead(f *testing.F) {
	f.Add("before-checkpoint", "sync now", "timeout", "10s")
	f.Add("after-restore", `["sh","-c","true"]`, "after-restore.on-failure", "log")
	f.Add("after-checkpoint", "signal:SIGUSR1", "after-checkpoint", "true")
	f.Fuzz(func(t *testing.T, name, value, of, more string) {
		all, err := Read(map[string]string{annotations.HookPrefix + name: value, annotations.HookPrefix + of: more}, time.Hour)
		if err != nil {
			return
		}
		for _, h := range []*Hook{all.BeforeCheckpoint, all.AfterCheckpoint, all.AfterRestore} {
			if h == nil {
				continue
			}
			if h.Timeout <= 0 || (h.Signal == 0) == (len(h.Command) == 0) || len(h.Command) > 0 && h.Command[0] == "" {
				t.Errorf("accepted %+v", h)
			}
		}
	})
}

// What a container has left in the place of its note never stops the next one.
func FuzzNote(f *testing.F) {
	f.Add([]byte(`{"restores":3,"id":"x","time":"2026-01-02T03:04:05Z"}`))
	f.Add([]byte(`{"restores":-1}`))
	f.Add([]byte(`{"restores":1e300}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		root := t.TempDir()
		dir := filepath.Join(root, run, noteDir)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, noteName), data, 0o600); err != nil {
			t.Fatal(err)
		}
		at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(at)
		before := readNote(at)
		note, err := writeNote(root, nil)
		if err != nil || note.Restores != before.Restores+1 || note.Restores < 1 {
			t.Fatalf("after %q: %+v, %v", data, note, err)
		}
		text, err := os.ReadFile(filepath.Join(dir, noteName))
		if err != nil {
			t.Fatal(err)
		}
		var written Note
		if err := json.Unmarshal(text, &written); err != nil || written.ID != note.ID {
			t.Errorf("%q was written: %v", text, err)
		}
	})
}
