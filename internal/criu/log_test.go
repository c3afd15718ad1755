// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestExplain(t *testing.T) {
	failed := errors.New("criu failed: type DUMP errno 0")
	t.Run("quoted and kept", func(t *testing.T) {
		bundle, work, dir := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "logs")
		for kind, log := range map[string]Log{"dump": DumpLog(bundle, dir, "ns-id"), "restore": RestoreLog(bundle, work, dir, "ns-id")} {
			writeFile(t, log.Path, "(00.1) Error (a:1): "+kind+"\n")
			err := log.Explain(failed)
			kept := filepath.Join(dir, "ns-id-"+kind+".log")
			if !errors.Is(err, failed) {
				t.Errorf("the error is lost: %v", err)
			}
			wantError(t, err, "CRIU said: Error (a:1): "+kind+"; its log: "+kept)
			if data, err := os.ReadFile(kept); err != nil || !strings.Contains(string(data), kind) {
				t.Errorf("kept %q, error %v", data, err)
			}
		}
	})
	t.Run("a known cause", func(t *testing.T) {
		log := DumpLog(t.TempDir(), t.TempDir(), "ns-id")
		writeFile(t, log.Path, "(00.1) Error (a:1): bfd: Error flushing image: No space left on device\n")
		err := log.Explain(failed)
		if !errors.Is(err, failed) {
			t.Errorf("the error is lost: %v", err)
		}
		wantError(t, err, "make room, or choose another directory; CRIU said: Error (a:1): bfd: ")
	})
	t.Run("nothing to quote", func(t *testing.T) {
		dir := t.TempDir()
		log := DumpLog(t.TempDir(), dir, "ns-id")
		writeFile(t, log.Path, "(00.1) killed\n")
		wantError(t, log.Explain(failed), "CRIU's log: "+dir)
	})
	t.Run("nowhere to keep it", func(t *testing.T) {
		bundle := t.TempDir()
		log := DumpLog(bundle, filepath.Join(bundle, "criu-dump.log", "below a file"), "ns-id")
		writeFile(t, log.Path, "Error (a:1): b\n")
		wantError(t, log.Explain(failed), "its log: "+log.Path)
	})
	t.Run("CRIU left no log", func(t *testing.T) {
		bundle := t.TempDir()
		wantError(t, DumpLog(bundle, t.TempDir(), "ns-id").Explain(failed), "unknown option: "+filepath.Join(bundle, SettingsName))
	})
	t.Run("CRIU did not run", func(t *testing.T) {
		plain := errors.New("mkdir: no such directory")
		if err := DumpLog(t.TempDir(), t.TempDir(), "ns-id").Explain(plain); err.Error() != plain.Error() || !errors.Is(err, plain) {
			t.Errorf("got %v, want the error as it was", err)
		}
	})
	t.Run("an earlier one", func(t *testing.T) {
		log := DumpLog(t.TempDir(), t.TempDir(), "ns-id")
		writeFile(t, log.Path, "Error (a:1): b\n")
		for range 2 { // the second time there is none
			wantError(t, log.Remove(), "")
		}
		wantError(t, log.Explain(failed), "left no log")
	})
}

// A log that a hostile checkpoint has made large is kept by its end, and logs of containers that
// are gone do not pile up.
func TestKeptLogsAreBounded(t *testing.T) {
	dir := t.TempDir()
	failed := errors.New("criu failed: type RESTORE errno 0")
	for n := range keptLogs + 20 {
		log := DumpLog(t.TempDir(), dir, fmt.Sprintf("ns-%d", n))
		writeFile(t, log.Path, "(00.1) Error (a:1): b\n")
		_ = log.Explain(failed)
		at := time.Unix(int64(n), 0)
		if err := os.Chtimes(log.Kept, at, at); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil || len(kept) != keptLogs {
		t.Errorf("%d logs are kept, error %v", len(kept), err)
	}
	if _, err := os.Stat(filepath.Join(dir, "ns-0-dump.log")); err == nil {
		t.Error("the oldest is kept")
	}
	log := DumpLog(t.TempDir(), dir, "large")
	writeFile(t, log.Path, strings.Repeat("x", maxLog)+"\nError (a:1): at the end\n")
	wantError(t, log.Explain(failed), "CRIU said: Error (a:1): at the end")
	if st, err := os.Stat(log.Kept); err != nil || st.Size() != maxLog {
		t.Errorf("kept: %v, error %v", st, err)
	}
}
