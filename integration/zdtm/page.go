// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package zdtm

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuckpt/gpuckpt/integration/beside"
)

// Page returns docs/internals/zdtm.md; from is the directory in docs/results that has the results.
func Page(results map[string]beside.Result, from string) string {
	tests := slices.Sorted(maps.Keys(results))
	compared := slices.DeleteFunc(slices.Clone(tests), func(test string) bool { return results[test].Skipped != "" })
	var b strings.Builder
	fmt.Fprintf(&b, `# CRIU's own suite

`+"`make test-zdtm`"+` makes this page. It builds the static tests of the CRIU release that gpuckpt ships,
and runs each in a container with a network of its own. runc's shim gets the options that the suite
gives CRIU, gpuckpt's shim none. "In place" is a checkpoint into a directory that ends
the container, and a restore in the same container. "Image" is a checkpoint image by ctr, and a
restore as a new container. A test passes if its program says so after the restore.
%[2]s compare the device number of the root file system. A restore in
place mounts it anew, and with both shims they run until it is the old one.

A test that passes with runc's shim passes here, or is an [exception](#exceptions), or
`+"`make test-zdtm`"+` fails. `+"`make test`"+` runs a sample. The results are in
[%[1]s](../results/README.md#%[1]s).

`, from, strings.Join(strings.Fields(numbered), " and "))
	outcomes := func(test, way string) (runc, ours *beside.Outcome) {
		return results[test].Runc[way], results[test].Ours[way]
	}
	fmt.Fprintf(&b, "| of %d tests | way | runc's shim | gpuckpt | ratio |\n|---|---|---|---|---|\n", len(compared))
	for _, way := range beside.Ways {
		var runcs, both, all int
		for _, test := range compared {
			runc, ours := outcomes(test, way)
			if runc.Passed() {
				runcs++
			}
			if ours.Passed() {
				all++
			}
			if runc.Passed() && ours.Passed() {
				both++
			}
		}
		fmt.Fprintf(&b, "| pass | %s | %d | %d, of them %d of runc's %[2]d | |\n", way, runcs, all, both)
	}
	for _, m := range []struct {
		what, unit string
		of         func(*beside.Outcome) float64
	}{
		{"median checkpoint", "%.2f s", func(o *beside.Outcome) float64 { return o.Checkpoint }},
		{"median restore", "%.2f s", func(o *beside.Outcome) float64 { return o.Restore }},
		{"median size", "%.0f KiB", func(o *beside.Outcome) float64 { return float64(o.Size) / 1024 }},
	} {
		for _, way := range beside.Ways {
			var runcs, all, ratios []float64
			for _, test := range compared {
				if runc, ours := outcomes(test, way); runc.Passed() && ours.Passed() {
					runcs, all = append(runcs, m.of(runc)), append(all, m.of(ours))
					ratios = append(ratios, m.of(ours)/m.of(runc))
				}
			}
			fmt.Fprintf(&b, "| %s | %s | "+m.unit+" | "+m.unit+" | %.2f |\n", m.what, way, beside.Median(runcs), beside.Median(all), beside.Median(ratios))
		}
	}
	b.WriteString("\nThe ratio is the median of the tests' ratios. Times are of one machine: compare the shims.\n\n## Exceptions\n\n" +
		"runc's shim restores these. gpuckpt refuses their checkpoint, and they run on, or\nthey come back different.\n\n| test | error | why |\n|---|---|---|\n")
	for _, e := range Exceptions {
		says := e.Says
		if e.Differs {
			says = "none; the test says " + says
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", strings.Join(strings.Fields(e.Tests), ", "), says, e.Why)
	}
	b.WriteString("\n## Restored by one of both\n\n")
	named := func(what string, belongs func(runc, ours *beside.Outcome) bool) {
		var names []string
		for _, test := range compared {
			if slices.ContainsFunc(beside.Ways, func(way string) bool { return belongs(outcomes(test, way)) }) {
				names = append(names, test)
			}
		}
		b.WriteString(wrap(what, names))
	}
	named("By gpuckpt alone, on at least one way", func(runc, ours *beside.Outcome) bool { return ours.Passed() && !runc.Passed() && !isUntried(runc) })
	named("By neither, on at least one way", func(runc, ours *beside.Outcome) bool { return !ours.Passed() && !runc.Passed() })
	named("By gpuckpt, and not tried with runc's shim, where CRIU hangs at a stopped process", func(runc, ours *beside.Outcome) bool { return ours.Passed() && isUntried(runc) })
	b.WriteString("## Not compared\n\n")
	reasons := make(map[string][]string)
	for _, test := range tests {
		if why, _, _ := strings.Cut(results[test].Skipped, ":"); why != "" {
			reasons[why] = append(reasons[why], test)
		}
	}
	for _, why := range slices.Sorted(maps.Keys(reasons)) {
		b.WriteString(wrap(strings.ToUpper(why[:1])+why[1:], reasons[why]))
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// untried is the error of what CRIU would hang at.
const untried = "not tried: CRIU hangs at a stopped process"

func isUntried(o *beside.Outcome) bool { return o.Error == untried }

// wrap makes a list of at most 100 columns.
func wrap(what string, names []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s (%d):\n\n```text\n", what, len(names))
	line := ""
	for _, name := range names {
		if len(line)+1+len(name) > 100 {
			b.WriteString(line + "\n")
			line = ""
		}
		line = strings.TrimPrefix(line+" "+name, " ")
	}
	return b.String() + line + "\n```\n\n"
}
