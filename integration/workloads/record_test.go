// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// step is one step of a training; the loss is as Python's float.hex() has it,
// so that two losses are equal if all their bits are.
type step struct {
	number int
	loss   string
}

// record is what a training wrote.
type record struct {
	steps []step
	// digest is of the trained weights; "" before the end.
	digest string
}

// last is the number of the last step, 0 before the first.
func (r record) last() int {
	if len(r.steps) == 0 {
		return 0
	}
	return r.steps[len(r.steps)-1].number
}

// parse reads a training's lines: "step 1 0x1.8p+1" and "done DIGEST". It passes
// over others, PyTorch's warnings for example, and a line without its end.
func parse(t *testing.T, text string) (r record) {
	t.Helper()
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if !strings.HasSuffix(line, "\n") || len(fields) == 0 {
			continue
		}
		switch {
		case fields[0] == "step" && len(fields) == 3:
			number, err := strconv.Atoi(fields[1])
			if err != nil {
				t.Fatalf("the training wrote %q: %v", line, err)
			}
			r.steps = append(r.steps, step{number, fields[2]})
		case fields[0] == "done" && len(fields) == 2:
			r.digest = fields[1]
		}
	}
	return r
}

// isSubsequence says whether of is part with none or some left out.
func isSubsequence(part, of []step) bool {
	for _, s := range of {
		if len(part) > 0 && part[0] == s {
			part = part[1:]
		}
	}
	return len(part) == 0
}

// difference words where two sequences begin to differ.
func difference(got, want []step) string {
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			return fmt.Sprintf("place %d has %v, want %v", i+1, got[i], want[i])
		}
	}
	return fmt.Sprintf("it has %d steps, want %d", len(got), len(want))
}

// What the comparison rests on.
func TestRecord(t *testing.T) {
	r := parse(t, "PyTorch 2\nstep 1 0x1.8p+1\nstep 2 0x1.9p+1\nwarning: step by step\ndone abc\nstep 3 0x1")
	if len(r.steps) != 2 || r.last() != 2 || r.digest != "abc" || r.steps[1] != (step{2, "0x1.9p+1"}) {
		t.Errorf("parsed as %+v", r)
	}
	whole := []step{{1, "a"}, {2, "b"}, {3, "c"}}
	for _, test := range []struct {
		part []step
		want bool
	}{
		{whole, true},
		{[]step{{1, "a"}, {3, "c"}}, true},
		{nil, true},
		{[]step{{1, "a"}, {1, "a"}}, false},
		{[]step{{3, "c"}, {2, "b"}}, false},
		{[]step{{2, "x"}}, false},
	} {
		if got := isSubsequence(test.part, whole); got != test.want {
			t.Errorf("isSubsequence(%v, %v) is %v", test.part, whole, got)
		}
	}
}

// A program goes on as long with few steps as with the usual ones, and longer with large checkpoints.
func TestPause(t *testing.T) {
	for _, test := range []struct {
		host  int64
		steps int
		want  string
	}{{0, 200, "0.06"}, {20, 60, "0.2"}, {20, 1000, "0.06"}, {30, 60, "0.3"}} {
		if got := pauseOf(programs.Program{Host: test.host}, test.steps); got != test.want {
			t.Errorf("%d steps of one with %d GiB have a pause of %s s, want %s", test.steps, test.host, got, test.want)
		}
	}
}
