// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestLastErrors(t *testing.T) {
	long := "Error (criu/x.c:1): " + strings.Repeat("x", 1000)
	for _, test := range []struct {
		name, log string
		want      []string
	}{
		{name: "empty"},
		{name: "no error", log: "(00.000001) Version: 4.2\n(00.000002) Warn  (criu/a.c:1): odd\n"},
		{name: "one", log: "(00.1) Error (criu/a.c:1): bad\n(00.2) fine\n", want: []string{"Error (criu/a.c:1): bad"}},
		{name: "no line feed at the end", log: "(00.1) Error (criu/a.c:1): bad", want: []string{"Error (criu/a.c:1): bad"}},
		{
			name: "the last three", log: "Error (a:1): 1\nError (a:2): 2\nError (a:3): 3\n(00.3) x\nError (a:4): 4\n",
			want: []string{"Error (a:2): 2", "Error (a:3): 3", "Error (a:4): 4"},
		},
		{name: "a long one", log: "(00.1) " + long + "\n", want: []string{long[:quotedBytes]}},
		{name: "the harmless one", log: "(00.1) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := lastErrors(strings.NewReader(test.log)); !slices.Equal(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

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

func FuzzLastErrors(f *testing.F) {
	f.Add("(00.1) Error (a:1): b\n")
	f.Add("Error (Error (\n\nError (")
	f.Add(strings.Repeat("Error (x", 200) + "\xff\n")
	f.Fuzz(func(t *testing.T, log string) {
		got := lastErrors(strings.NewReader(log))
		if len(got) > quotedErrors {
			t.Errorf("%d errors", len(got))
		}
		for _, line := range got {
			if len(line) > quotedBytes || strings.Contains(line, "\n") || !strings.HasPrefix(line, "Error (") {
				t.Errorf("quoted %q", line)
			}
		}
	})
}
