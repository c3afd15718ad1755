// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package beside takes a container there and back by runc's shim and by this project's, and compares: what
// passes there must pass here, or be on a list of exceptions with a reason.
package beside

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// The ways there and back.
const (
	Place = "in place" // into a directory, and restored in the same container
	Image = "image"    // as an image, restored in a new container
	GPU   = "GPU"      // as an image, beside a program that uses a GPU; by this project's shim alone
)

// Ways are those of both shims.
var Ways = []string{Place, Image}

// Outcome is what became of a test on one way.
type Outcome struct {
	// Failed is the step that failed, or empty: "checkpoint", "restore", "verdict".
	Failed string `json:"failed,omitempty"`
	Error  string `json:"error,omitempty"`
	// RunsOn is whether the test passed after its checkpoint was refused.
	RunsOn bool `json:"runsOn,omitempty"`
	// Checkpoint and Restore are seconds, Size is in bytes.
	Checkpoint float64 `json:"checkpoint,omitempty"`
	Restore    float64 `json:"restore,omitempty"`
	Size       int64   `json:"size,omitempty"`
}

// Passed reports whether the test was tried and passed.
func (o *Outcome) Passed() bool { return o != nil && o.Failed == "" }

// Exception is what runc's shim restores, and this one does not.
type Exception struct {
	// Tests are their names, with spaces.
	Tests string
	// Differs is whether they are restored and come back different, or are different from the start. Else
	// their checkpoint is refused, and they run on.
	Differs bool
	// Says is part of the error, or of the test's verdict.
	Says string
	// Why is the reason.
	Why string
}

// of returns the entry with a test, or nil.
func of(list []Exception, test string) *Exception {
	for i := range list {
		if slices.Contains(strings.Fields(list[i].Tests), test) {
			return &list[i]
		}
	}
	return nil
}

// Result is one test's.
type Result struct {
	Test string `json:"test"`
	// Commit is the one under test.
	Commit string `json:"commit"`
	// Skipped is why the test was not tried, or empty.
	Skipped string `json:"skipped,omitempty"`
	// Privileged is whether the test needs a privileged container.
	Privileged bool `json:"privileged,omitempty"`
	// Runc and Ours have the outcome of each way.
	Runc map[string]*Outcome `json:"runc,omitempty"`
	Ours map[string]*Outcome `json:"ours,omitempty"`
}

// Read reads results, one a line. Of each test the last counts.
func Read(r io.Reader) (map[string]Result, error) {
	results := make(map[string]Result)
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var result Result
		if err := json.Unmarshal(lines.Bytes(), &result); err != nil {
			return nil, fmt.Errorf("read results: %w", err)
		}
		results[result.Test] = result
	}
	return results, lines.Err()
}

// Log has the results of this run, and those of earlier ones of this commit, which are not run again. A nil
// one has none, and keeps none.
type Log struct {
	old  map[string]Result
	mu   sync.Mutex
	file *os.File
}

// OpenLog reads and continues a file. The empty path is none.
func OpenLog(path, commit string) (*Log, error) {
	if path == "" {
		return nil, nil
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	old, err := Read(file)
	maps.DeleteFunc(old, func(_ string, r Result) bool { return r.Commit != commit || strings.HasSuffix(commit, "-dirty") })
	return &Log{file: file, old: old}, err
}

// Has returns an earlier result.
func (l *Log) Has(test string) (r Result, has bool) {
	if l != nil {
		r, has = l.old[test]
	}
	return r, has
}

// Add keeps a result.
func (l *Log) Add(r Result) error {
	if l == nil {
		return nil
	}
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err = l.file.Write(append(line, '\n'))
	return err
}

// Judge says what is wrong about a result, or nothing. What passes with runc's shim passes here, on
// each way, or fails as the list of exceptions says. Beside a GPU passes what passes as an image with runc's.
func (r Result) Judge(exceptions []Exception) error {
	listed := of(exceptions, r.Test)
	for _, way := range []string{Place, Image, GPU} {
		ours, runc := r.Ours[way], r.Runc[way]
		if way == GPU {
			runc = r.Runc[Image]
		}
		switch {
		case r.Skipped != "" || ours == nil:
		case listed == nil && (ours.Passed() || r.Runc != nil && !runc.Passed()):
		case listed == nil:
			return fmt.Errorf("%s: %s: %s", way, ours.Failed, ours.Error)
		case ours.Passed():
			return fmt.Errorf("%s: it passes, and is on the list of exceptions: %s", way, listed.Why)
		case !listed.Differs && !ours.RunsOn || listed.Differs && ours.Failed != "verdict" && ours.Failed != "start":
			return fmt.Errorf("%s: it is not to fail so: %s: %s", way, ours.Failed, ours.Error)
		case !strings.Contains(ours.Error, listed.Says):
			return fmt.Errorf("%s: it is to fail with %q: %s", way, listed.Says, ours.Error)
		}
	}
	return nil
}

// Median is the middle value, or the upper of two.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// Last reads the last results of a name that docs/results of a repository has, and returns the name of their
// directory.
func Last(root, name string) (map[string]Result, string, error) {
	logs, err := filepath.Glob(filepath.Join(root, "docs/results/*", name))
	if err != nil || len(logs) == 0 {
		return nil, "", errors.Join(fmt.Errorf("docs/results has no %s", name), err)
	}
	path := slices.Max(logs) // their directories begin with the date
	file, err := os.Open(path)
	if err != nil {
		return nil, "", err
	}
	defer file.Close()
	results, err := Read(file)
	return results, filepath.Base(filepath.Dir(path)), err
}
