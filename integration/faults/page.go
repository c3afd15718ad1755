// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"path/filepath"
	"strings"
)

const pageHead = `# What can go wrong, and what you will find

This page is made of the table that ` + "`make test-faults`" + ` works through: each fault is made at the
begin and at the end of each step, and of each undo on the way back. Where a process lives only
within a step, the fault is made in its middle. After each fault a test checks that

- the program counts on with the right number, or has ended where the table says so;
- nothing is locked, frozen, traced, mapped or mounted, and no process, cgroup, open file, directory
  or lease is left;
- the next checkpoint works, and its restore.

A fault never makes a checkpoint wrong: it is complete, or there is none.
[how-it-works.md](how-it-works.md) explains the steps,
[troubleshooting.md](../troubleshooting.md) the errors.
`

const notMade = `
## What is not made

- **The wall clock jumps.** No wait goes by it: a test reads the product's source for times without
  the monotonic clock, and knows what each is for. The clock of a machine that others use cannot be
  set, and a time namespace has no wall clock of its own. containerd ends leases by the wall clock:
  a jump of a day can end that of an image that is being built.
- **The private copy of CRIU's images is full.** It is memory with a bound of its own, which a unit
  test reaches.
- **A SIGSEGV that somebody sends to the program.** The kernel drops it, as the program is the first
  process of its container. The test has the program crash.
- **A block device loses a write and says nothing.** The digests of GPU state and of signed
  checkpoints find what is wrong; loss of power at each flush is tested (TestPowerLost).
- **A fault of the machine's hardware or of its kernel.**
`

// WalkPaths are the logs of the last walk, from the root of the repository: of all, and of what the table has had since.
var WalkPaths = []string{
	"docs/results/2026-11-23-e59b635-software-faults/walk.txt",
	"docs/results/2026-11-24-26b1a67-software-drain/walk.txt",
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
		for _, f := range Faults() {
			if f.Command == command {
				n := tallied(walk, func(c Cell) bool { return c.Fault.Name == f.Name })
				fmt.Fprintf(&b, "| %s | %s | %d | %d |\n", f.Words, f.Found, n.cells, n.passed)
			}
		}
	}
	b.WriteString(notMade)
	return b.String()
}

// walkPart is what a walk found.
func walkPart(walk []Tried) string {
	var logs []string
	for _, path := range WalkPaths {
		dir := filepath.Dir(strings.TrimPrefix(path, "docs/"))
		logs = append(logs, fmt.Sprintf("[%s](../%s/)", filepath.Base(dir), dir))
	}
	n := tallied(walk, func(Cell) bool { return true })
	return fmt.Sprintf(`The last walk, of commits %s, tried %d of them on the
software GPU, and %d passed. Its logs are
%s.
`, strings.Join(commits(walk), " and "), n.walked, n.passed, strings.Join(logs, "\nand "))
}
