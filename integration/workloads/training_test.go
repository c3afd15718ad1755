// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// steps is how many a training has; its checkpoint comes after the first third.
const steps = 360

// lossFile is where a training writes its losses, in the container's own layer.
const lossFile = "/tmp/losses"

// A container of the host's directories is restored on any machine, and what lives in host memory
// goes on where it stopped. On a GPU, train.py is one of the workloads.
func TestPython(t *testing.T) {
	result := results.Add(t)
	needsPython(t)
	interrupt(t, result, false, "--model", "none")
}

// interrupt trains twice, with a checkpoint, a kill and a restore in the second
// run, and compares.
func interrupt(t *testing.T, result *harness.TestResult, cuda bool, args ...string) {
	t.Helper()
	args = append(args, "--steps", strconv.Itoa(steps), "--file", lossFile)
	var want record
	if err := result.Time("uninterrupted", func() error { want = train(t, cuda, args); return nil }); err != nil {
		t.Fatal(err)
	}

	k := start(t, cuda, harness.RunSpec{ID: harness.Name(t)}, "train.py", args...)
	within(t, k, "a third of the training", func() bool { return parse(t, k.Logs()).last() >= steps/3 })
	before := parse(t, k.Logs()).last()
	ref := checkpoint(t, result, k)
	after := parse(t, k.Logs()).last()
	within(t, k, "it was left running", func() bool { return parse(t, k.Logs()).last() >= min(after+10, steps) })
	k.MustRemove(t)
	killed := k.Logs()

	r := restore(t, result, k, ref)
	output := func() string { return strings.TrimPrefix(r.Logs(), killed) } // of the restored one alone
	within(t, r, "the restored training ends", func() bool { return parse(t, output()).digest != "" })
	got := parse(t, output())

	// The file came back as it was at the checkpoint and was written on from
	// there: it has every step once if it and the memory are of one moment.
	if file := parse(t, readFile(t, r, lossFile)); !slices.Equal(file.steps, want.steps) {
		t.Errorf("the file is not that of an uninterrupted run: %s", difference(file.steps, want.steps))
	}
	// Of its output ctr, which reads it until it ends itself, may lose a line; no
	// step may come twice, out of order, or with another loss.
	first := got.steps[0].number
	if last := parse(t, killed).last(); first <= before || first > last {
		t.Errorf("the restored training began with step %d; its checkpoint was taken after step %d and it was killed after step %d", first, before, last)
	}
	rest := want.steps[first-1:]
	if missing := len(rest) - len(got.steps); missing < 0 || missing > 1 || !isSubsequence(got.steps, rest) {
		t.Errorf("the restored output is not that of an uninterrupted run: %s", difference(got.steps, rest))
	}
	if got.digest != want.digest {
		t.Errorf("the weights' SHA-256 is %s, that of an uninterrupted run %s", got.digest, want.digest)
	}
	t.Logf("restored at step %d of %d; steps and weights (%s) compared with an uninterrupted run", first, steps, got.digest)
	result.Number("steps_count", steps)
	result.Number("restored_at_step", float64(first))
}

// train runs a training to its end, and checks that what it gives can tell one
// run from another.
func train(t *testing.T, cuda bool, args []string) record {
	t.Helper()
	k := start(t, cuda, harness.RunSpec{ID: harness.Name(t) + "-whole"}, "train.py", args...)
	within(t, k, "the uninterrupted training ends", func() bool { return parse(t, k.Logs()).digest != "" })
	r := parse(t, k.Logs())
	if file := parse(t, readFile(t, k, lossFile)); !slices.Equal(file.steps, r.steps) {
		t.Fatalf("file and output of an uninterrupted run differ: %s", difference(file.steps, r.steps))
	}
	k.MustRemove(t)
	if len(r.steps) != steps {
		t.Fatalf("%d steps, want %d", len(r.steps), steps)
	}
	losses := map[string]bool{}
	for i, s := range r.steps {
		if s.number != i+1 {
			t.Fatalf("step %d comes as number %d", s.number, i+1)
		}
		// "nan" and "inf" have no digits to compare.
		if !strings.HasPrefix(s.loss, "0x") {
			t.Fatalf("the loss of step %d is %s", s.number, s.loss)
		}
		losses[s.loss] = true
	}
	if len(losses) < steps/2 {
		t.Fatalf("%d steps have only %d different losses", steps, len(losses))
	}
	return r
}
