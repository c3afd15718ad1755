// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package servers

import (
	"fmt"
	"strings"

	"github.com/gpuckpt/gpuckpt/integration/beside"
)

// Exceptions are servers that runc's shim restores, and this one does not.
var Exceptions []beside.Exception

// Page returns docs/internals/servers.md; from is the directory in docs/results that has the results.
func Page(results map[string]beside.Result, from string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `# Servers

`+"`make test-servers`"+` makes this page. It runs servers of Debian 12 as their unit files do, in
containers with a network of their own. A question has a server add one to what it has: a row, a
mail, a line of its log. Of most, a client has a connection open. Each server goes there and back
three times in a row. After each time it must answer right, and its client must be served on the
same connection.

"In place" and "image" are those of [zdtm.md](zdtm.md). "GPU" is an image of a container in which a
program uses the software GPU, too. runc's shim gets the options `+"`tcp-established`, `file-locks`"+` and
`+"`link-remap`"+`, gpuckpt's shim none.

What passes with runc's shim passes here, or `+"`make test-servers`"+` fails. `+"`make test`"+` runs a sample.
The results are in
[%[1]s](../results/README.md#%[1]s).

`, from)
	ways := []struct {
		name string
		of   func(beside.Result) *beside.Outcome
	}{
		{"runc's shim, in place", func(r beside.Result) *beside.Outcome { return r.Runc[beside.Place] }},
		{"runc's shim, image", func(r beside.Result) *beside.Outcome { return r.Runc[beside.Image] }},
		{"gpuckpt, in place", func(r beside.Result) *beside.Outcome { return r.Ours[beside.Place] }},
		{"gpuckpt, image", func(r beside.Result) *beside.Outcome { return r.Ours[beside.Image] }},
		{"gpuckpt, GPU", func(r beside.Result) *beside.Outcome { return r.Ours[beside.GPU] }},
	}
	b.WriteString("| server |")
	for _, way := range ways {
		fmt.Fprintf(&b, " %s |", way.name)
	}
	b.WriteString("\n|---|---|---|---|---|---|\n")
	var refused, lost []string
	var reasons strings.Builder
	passed := make([]int, len(ways))
	seconds := make([][2][]float64, len(ways))
	sizes := make([][]float64, len(ways))
	all := 0
	for _, server := range Table {
		result, has := results[server.Name]
		if !has {
			continue
		}
		all++
		fmt.Fprintf(&b, "| %s |", server.Name)
		for i, way := range ways {
			outcome := way.of(result)
			if outcome.Passed() {
				passed[i]++
				for j, s := range []float64{outcome.Checkpoint, outcome.Restore} {
					seconds[i][j] = append(seconds[i][j], s)
				}
				sizes[i] = append(sizes[i], float64(outcome.Size)/(1<<20))
				fmt.Fprintf(&b, " %.1f s, %.1f s, %.1f MiB |", outcome.Checkpoint, outcome.Restore, float64(outcome.Size)/(1<<20))
				continue
			}
			fmt.Fprintf(&b, " fails at the %s |", outcome.Failed)
			text := strings.Join(strings.Fields(strings.ReplaceAll(outcome.Error, "|", "/")), " ")
			if len(text) > 120 {
				text = "…" + text[len(text)-120:]
			}
			fmt.Fprintf(&reasons, "| %s | %s | %s | %s |\n", server.Name, way.name, outcome.Failed, text)
			runc := result.Runc[beside.Image]
			if i == 2 {
				runc = result.Runc[beside.Place]
			}
			switch name := server.Name + " (" + way.name + ")"; {
			case i < 2 || !runc.Passed():
			case outcome.Failed == "checkpoint" && outcome.RunsOn:
				refused = append(refused, name)
			default:
				lost = append(lost, name)
			}
		}
		b.WriteString("\n")
	}
	for _, row := range []struct {
		what string
		cell func(i int) string
	}{
		{fmt.Sprintf("pass, of %d", all), func(i int) string { return fmt.Sprint(passed[i]) }},
		{"medians", func(i int) string {
			return fmt.Sprintf("%.1f s, %.1f s, %.1f MiB", beside.Median(seconds[i][0]), beside.Median(seconds[i][1]), beside.Median(sizes[i]))
		}},
	} {
		fmt.Fprintf(&b, "| **%s** |", row.what)
		for i := range ways {
			fmt.Fprintf(&b, " %s |", row.cell(i))
		}
		b.WriteString("\n")
	}
	b.WriteString("\nThe figures are the median times of a checkpoint and of a restore, and the size of the last\n" +
		"checkpoint. Times are of one machine: compare the shims.\n")
	fmt.Fprintf(&b, "\nFalse refusals, of what travels with runc's shim: %d%s. Lost or different: %d%s.\n",
		len(refused), named(refused), len(lost), named(lost))
	if reasons.Len() > 0 {
		b.WriteString("\n| server | by | fails at the | error |\n|---|---|---|---|\n" + reasons.String())
	}
	return b.String()
}

func named(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return ": " + strings.Join(names, ", ")
}
