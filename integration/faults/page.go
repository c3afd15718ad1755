// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

const pageHead = `# What can go wrong, and what you will find

` + "`make test-faults`" + ` makes each fault at the start and at the end of each step, and of each undo.
Where a process lives only within a step, the fault is made in its middle. After each fault a test
checks that

- the program counts with the right number, or has ended where the table says so;
- nothing is locked, frozen, traced, mapped or mounted, and no process, cgroup, open file, directory
  or lease is left;
- the next checkpoint works, and its restore.

GPU memory goes its usual [way](../decisions/0042-mechanisms.md). Four others are tried in the steps
that differ: the driver alone, a window to a disk, kept on the GPU, back on another GPU.

A fault never makes a checkpoint wrong: it is complete, or there is none.
[how-it-works.md](how-it-works.md) explains the steps,
[troubleshooting.md](../troubleshooting.md) the errors.
`

const notMade = `
A process that does nothing is ended: CRIU after [a time](../configuration.md#criu), another runc
after a minute. A driver that does nothing has ` + "`stall_timeout`" + `, GPU memory that moves half an hour.

## What is not made

- **GPU state still arrives, or a mover has filled GPU memory beforehand.** These restores have
  tests of their own: TestDisturbedArrival, TestInterruptedArrival, TestInterposerPrefilled.
- **The wall clock jumps.** No wait uses it, which a test of the product's source checks. containerd
  ends leases by it: a jump of a day can end that of an image that is being built.
- **The private copy of CRIU's images is full.** A unit test reaches its bound.
- **A SIGSEGV that somebody sends to the program.** The kernel drops it, as the program is the first
  process of its container. The test has the program crash.
- **A block device loses a write and says nothing.** Digests find what is wrong; loss of power at
  each flush is tested (` + "`TestPowerLost`" + `).
- **A fault of the machine's hardware or of its kernel.**
`

// WalkPaths are the logs of the last walks, from the root of the repository: of all, and of what the table has had since.
// The newest two also have samples of all.
var WalkPaths = []string{
	"docs/results/2026-11-23-e59b635-software-faults/walk.txt",
	"docs/results/2026-11-24-26b1a67-software-drain/walk.txt",
	"docs/results/2026-11-27-6edb618-software-ways/walk.txt",
	"docs/results/2026-11-27-f9437dd-software-walk/walk.txt",
}

// Page returns docs/internals/faults.md, with what a walk found.
func Page(walk []Tried) string {
	var b strings.Builder
	b.WriteString(pageHead)
	cells := Cells()
	places := make(map[string]bool)
	for _, c := range cells {
		places[c.Place.String()] = true
	}
	fmt.Fprintf(&b, "\nThere are %d places and %d faults. %d of the pairs make sense and are tested.\n", len(places), len(Faults()), len(cells))
	b.WriteString(walkPart(walk))
	for _, command := range []bool{false, true} {
		if command {
			b.WriteString("\n## Faults of commands\n\n")
		} else {
			b.WriteString("\n## Faults of operations\n\n")
		}
		b.WriteString("| what goes wrong | what you find | places | passed |\n|---|---|---|---|\n")
		for _, found := range findings(command) {
			var words []string
			names := make(map[string]bool)
			for _, f := range Faults() {
				if f.Command == command && f.Found == found {
					words, names[f.Name] = append(words, f.Words), true
				}
			}
			n := tallied(walk, func(c Cell) bool { return names[c.Fault.Name] })
			fmt.Fprintf(&b, "| %s | %s | %d | %d |\n", strings.Join(words, "; "), found, n.cells, n.passed)
		}
	}
	b.WriteString(notMade)
	return b.String()
}

// findings are what the faults lead to, each once, in the order of the table.
func findings(command bool) (found []string) {
	for _, f := range Faults() {
		if f.Command == command && !slices.Contains(found, f.Found) {
			found = append(found, f.Found)
		}
	}
	return found
}

// walkPart is what a walk found.
func walkPart(walk []Tried) string {
	var logs []string
	for _, path := range WalkPaths {
		dir := filepath.Dir(strings.TrimPrefix(path, "docs/"))
		logs = append(logs, fmt.Sprintf("[%s](../%s/)", filepath.Base(dir), dir))
	}
	n := tallied(walk, func(Cell) bool { return true })
	return fmt.Sprintf(`The last walks tried %d of them on the software GPU, and %d passed. They were of the commits
%s.
Their logs: %s.
`, n.walked, n.passed, strings.Join(commits(walk), ", "), strings.Join(logs, ",\n"))
}
