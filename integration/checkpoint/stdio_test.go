// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Input, output and exit codes are as with runc's shim.
func TestIO(t *testing.T) {
	results.Add(t)
	for _, test := range []struct {
		name, stdin string
		args        []string
		want        harness.Output
	}{
		{name: "success", args: []string{"exit", "0"}},
		{name: "exit code", args: []string{"exit", "7"}, want: harness.Output{ExitCode: 7}},
		{name: "output", args: []string{"echo", "two", "words"}, want: harness.Output{Stdout: "two words\n"}},
		{name: "input", args: []string{"cat"}, stdin: strings.Repeat("line\n", 20000), want: harness.Output{Stdout: strings.Repeat("line\n", 20000)}},
		{name: "errors", args: []string{"plain", "--no-such", "x"}, want: harness.Output{Stderr: "gpuwork: unknown option --no-such\n", ExitCode: 2}},
	} {
		for _, runtime := range []string{harness.Runtime, harness.RuncRuntime} {
			got, err := shared.RunAttached(t.Context(), harness.RunSpec{
				ID: harness.Name(t), Runtime: runtime, GPUs: []int{0}, Args: append([]string{"gpuwork"}, test.args...),
			}, strings.NewReader(test.stdin))
			if err != nil {
				t.Fatal(err)
			}
			got.Stderr = withoutDeprecations(got.Stderr)
			if got != test.want {
				t.Errorf("%s with %s: got %.300s, want %.300s", test.name, runtime, fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", test.want))
			}
		}
	}
}

// withoutDeprecations drops what ctr itself has to say about the machine.
func withoutDeprecations(text string) string {
	var kept strings.Builder
	for line := range strings.Lines(text) {
		if !strings.Contains(line, "DEPRECATION") {
			kept.WriteString(line)
		}
	}
	return kept.String()
}

// What a program writes after it was restored comes out, and its exit code too.
func TestRestoredIO(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter") // which prints each value
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "102")
	r.Expect(t, "count", "103")
	harness.Within(t, "the output of the restored program", func() bool {
		return strings.HasSuffix(r.Logs(), "102\n103\n")
	})
	if err := r.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if code, err := r.Wait(t.Context()); err != nil || code != 128+9 {
		t.Errorf("exit code %d, error %v; want 137", code, err)
	}
}
