// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Tried is one cell that was tried, and what came of it: a line of the log of a walk.
type Tried struct {
	// Commit is what the tests were built from.
	Commit string
	// Programs names the programs under test by their content.
	Programs string
	Passed   bool
	Took     time.Duration
	// Cell is the name of the cell.
	Cell string
}

// Write appends the line to a log. A line is written whole, so several walks may share a log.
func (r Tried) Write(w io.Writer) error {
	outcome := "failed"
	if r.Passed {
		outcome = "passed"
	}
	_, err := fmt.Fprintf(w, "%s %s %s %.1f %s\n", r.Commit, r.Programs, outcome, r.Took.Seconds(), r.Cell)
	return err
}

// ReadWalk reads the log of a walk.
func ReadWalk(r io.Reader) (all []Tried, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		words := strings.SplitN(lines.Text(), " ", 5)
		if len(words) != 5 || words[2] != "passed" && words[2] != "failed" {
			return nil, fmt.Errorf("read the log of a walk: %q is no line of one", lines.Text())
		}
		seconds, err := strconv.ParseFloat(words[3], 64)
		if err != nil {
			return nil, fmt.Errorf("read the log of a walk: %w", err)
		}
		all = append(all, Tried{
			Commit: words[0], Programs: words[1], Passed: words[2] == "passed",
			Took: time.Duration(seconds * float64(time.Second)), Cell: words[4],
		})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read the log of a walk: %w", err)
	}
	return all, nil
}

// Unknown returns the cells that did not pass when the walk tried them last, and those it did not try.
func Unknown(cells []Cell, walk []Tried) []Cell {
	last := make(map[string]bool)
	for _, r := range walk {
		last[r.Cell] = r.Passed
	}
	return slices.DeleteFunc(slices.Clone(cells), func(c Cell) bool { return last[c.String()] })
}

// tally is what came of some cells.
type tally struct{ cells, walked, passed int }

// tallied counts the cells that belong to something, and what a walk found of them at last.
func tallied(walk []Tried, belongs func(Cell) bool) (n tally) {
	last := make(map[string]bool)
	for _, r := range walk {
		last[r.Cell] = r.Passed
	}
	for _, c := range Cells() {
		if !belongs(c) {
			continue
		}
		n.cells++
		passed, walked := last[c.String()]
		if walked {
			n.walked++
		}
		if passed {
			n.passed++
		}
	}
	return n
}

// commits are those that a walk was made with, the first that was used first.
func commits(walk []Tried) []string {
	first := make(map[string]int)
	for i, r := range walk {
		if _, ok := first[r.Commit]; !ok {
			first[r.Commit] = i
		}
	}
	return slices.SortedFunc(maps.Keys(first), func(x, y string) int { return first[x] - first[y] })
}
