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

This page is made of the table that ` + "`make test-faults`" + ` works through: each fault is made at the
begin and at the end of each step, and of each undo on the way back. Where a process lives only
within a step, the fault is made in its middle. After each fault a test checks that

- the program counts on with the right number, or has ended where the table says so;
- nothing is locked, frozen, traced, mapped or mounted, and no process, cgroup, open file, directory
  or lease is left;
- the next checkpoint works, and its restore.

A fault never makes a checkpoint wrong: it is complete, or there is none.
[how-it-works.md](how-it-works.md) explains the steps, and [troubleshooting.md](troubleshooting.md)
the errors.

## The words

| outcome | means |
|---|---|
| through | the operation succeeds |
| back | the operation fails, and everything is as before it. A container that was to be suspended runs, one that was to be resumed is suspended. Of a restore nothing is left |
| again | the operation fails, and the container stays paused. ` + "`ctr tasks resume`" + ` lets it run |
| ends | the container ends, and nothing of it is left |
`

const holesHead = `
## Faults by phase

How many faults are tested in each phase of an operation, by kind. A fault may be of two kinds.
Where there is none, a letter names the reason.

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

// Page returns docs/faults.md, with what a walk found.
func Page(walk []Tried) string {
	var b strings.Builder
	b.WriteString(pageHead)
	cells := Cells()
	places := make(map[string]bool)
	for _, c := range cells {
		places[c.Place.String()] = true
	}
	fmt.Fprintf(&b, "\nThere are %d places and %d faults. %d of the pairs make sense and are tested.\n", len(places), len(Faults()), len(cells))
	b.WriteString(holesHead)
	b.WriteString(holes())
	b.WriteString(notMade)
	for _, command := range []bool{false, true} {
		if command {
			b.WriteString("\n## Faults of commands\n\n")
		} else {
			b.WriteString("\n## Faults of operations\n\n")
		}
		b.WriteString("| what goes wrong | what you find | tested at |\n|---|---|---|\n")
		for _, f := range Faults() {
			if f.Command != command {
				continue
			}
			n := 0
			for _, c := range cells {
				if c.Fault.Name == f.Name {
					n++
				}
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", f.Words, f.Found, counted(n, "place"))
		}
	}
	b.WriteString("\n## Step by step\n\nWhat is found where the step, or what comes right after it, fails; and where a process is killed\nmeanwhile that is neither the shim nor the program.\n")
	for _, s := range Scenarios() {
		title := strings.ToUpper(s.Words[:1]) + s.Words[1:]
		if s.Operation == Command {
			title = s.Words
		}
		fmt.Fprintf(&b, "\n### %s\n\n| step | it fails | a process is killed | tested |\n|---|---|---|---|\n", title)
		steps := slices.Clone(s.Steps)
		for _, u := range s.Undos {
			steps = append(steps, u.Name)
		}
		for i, step := range steps {
			var fails, other Outcome
			n := 0
			for _, c := range cells {
				if c.Place.Scenario.Name != s.Name || c.Place.Step != step || (c.Place.After != "") != (i >= len(s.Steps)) {
					continue
				}
				n++
				if c.Fault.Name == "error" || c.Fault.Name == "io-error" {
					fails |= c.Outcome
				} else if strings.HasPrefix(c.Fault.Name, "SIGKILL") && c.Outcome != Ends {
					other |= c.Outcome
				}
			}
			name := "**" + step + "**"
			if i >= len(s.Steps) {
				name += ", on the way back"
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", name, fails.words(), other.words(), counted(n, "fault"))
		}
	}
	b.WriteString(walkPart(walk))
	return b.String()
}

// walkPart is what a walk found.
func walkPart(walk []Tried) string {
	var b strings.Builder
	var logs []string
	for _, path := range WalkPaths {
		dir := filepath.Dir(strings.TrimPrefix(path, "docs/"))
		logs = append(logs, fmt.Sprintf("[%s](%s/)", filepath.Base(dir), dir))
	}
	fmt.Fprintf(&b, `
## The last walk

`+"`make test-faults`"+` tries each fault at each place on the software GPU, and notes what came of it.
This is the last walk, of the commits
%s.
Its logs are
%s.
Mended is what failed at first, by an error of the product or of the test, and then passed.

| what goes wrong | cells | walked | passed | of them mended |
|---|---|---|---|---|
`, strings.Join(commits(walk), ", "), strings.Join(logs, ",\n"))
	for _, f := range Faults() {
		fmt.Fprintf(&b, "| %s | %s |\n", f.Words, tallied(walk, func(c Cell) bool { return c.Fault.Name == f.Name }).row())
	}
	fmt.Fprintf(&b, "| all | %s |\n", tallied(walk, func(Cell) bool { return true }).row())
	b.WriteString("\n| place | cells | walked | passed | of them mended |\n|---|---|---|---|---|\n")
	for _, p := range Places() {
		if n := tallied(walk, func(c Cell) bool { return c.Place.String() == p.String() }); n.cells > 0 {
			fmt.Fprintf(&b, "| %v | %s |\n", p, n.row())
		}
	}
	return b.String()
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// words are those of the page.
func (o Outcome) words() string {
	var all []string
	for _, one := range []struct {
		outcome Outcome
		word    string
	}{{Through, "through"}, {Back, "back"}, {Retry, "again"}, {Ends, "ends"}} {
		if o&one.outcome != 0 {
			all = append(all, one.word)
		}
	}
	if all == nil {
		return "does not happen"
	}
	return strings.Join(all, ", or ")
}
