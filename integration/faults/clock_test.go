// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// wallClock are the files of the product with times of the wall clock, and what for. None waits by one.
var wallClock = map[string]string{
	"agent/kubectl-gpuckpt/commands.go":       "names of objects; when an event was, for a person",
	"agent/cluster/migration.go":              "when a pod was to end, for a person",
	"agent/cluster/schedule.go":               "schedules of people",
	"cmd/gpuckpt/ps.go":                       "shown",
	"images/checkpoint.go":                    "when a checkpoint was taken",
	"images/oci/layers.go":                    "a file's time in an archive",
	"images/oci/manifest.go":                  "when a checkpoint was taken",
	"internal/criu/plugin/plugin.c":           "a program's timer",
	"runtime/internal/told/remade.go":         "a program's timer",
	"internal/criu/log.go":                    "which logs are the newest",
	"runtime/create.go":                       "when an operation began, in the log",
	"runtime/internal/gpustate/describe.go":   "when a checkpoint was taken",
	"runtime/internal/hooks/note.go":          "when a container was restored, for its program",
	"internal/operation/journal/journal.go":   "when an operation began, for people",
	"internal/operation/sequence/sequence.go": "when an operation began, in the log",
	"internal/guard/trust/trust.go":           "how long it took, in the log",
	"internal/node/version/version.go":        "when a release was built",
}

var (
	// wallGo makes a time that has no reading of the monotonic clock, see package time.
	wallGo = regexp.MustCompile(`time\.(Unix\w*|Date|Parse|ParseInLocation)\(|\.(UTC|Local|ModTime)\(\)|\.Round\(0\)|\.In\(time\.|\bCLOCK_REALTIME\b`)
	// wallC waits by the wall clock, or reads it.
	wallC = regexp.MustCompile(`CLOCK_REALTIME|gettimeofday|\btime\(|(cond|mutex|sem|rwlock)_timed|TIMER_ABSTIME|FUTEX_CLOCK_REALTIME`)
)

// No wait of the product goes by the wall clock, so none ends early or late when somebody sets it:
// a time of time.Now has a reading of the monotonic clock, and whatever makes another one is known.
func TestNoWaitByTheWallClock(t *testing.T) {
	root := filepath.Join("..", "..")
	found := make(map[string]bool)
	for _, dir := range []string{"agent", "cdi", "cmd", "interposer", "cuda", "images", "internal", "runtime"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
			ext := filepath.Ext(path)
			c := slices.Contains([]string{".c", ".h", ".inc"}, ext)
			if err != nil || !entry.Type().IsRegular() || !c && ext != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(text)) {
				code, _, _ := strings.Cut(line, "//")
				if made := !c && wallGo.MatchString(code) || c && wallC.MatchString(code); !made {
					continue
				}
				found[name] = true
				if wallClock[name] == "" {
					t.Errorf("%s uses the wall clock: %s\tIf nothing waits by it, say in wallClock what for", name, line)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name := range wallClock {
		if !found[name] {
			t.Errorf("%s does not use the wall clock", name)
		}
	}
}
