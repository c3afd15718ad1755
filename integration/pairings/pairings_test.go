// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pairings

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// words are those of a field, all if it has none.
func words(field string, all []string) []string {
	if field == "" {
		return all
	}
	return strings.Fields(field)
}

// cellsOf returns what an entry says something of.
func cellsOf(e entry) (cells []cell) {
	for _, out := range words(e.outs, outs) {
		for _, store := range words(e.stores, stores) {
			for _, back := range words(e.backs, backs) {
				for _, gpu := range words(e.gpus, gpus) {
					cells = append(cells, cell{out, store, back, gpu})
				}
			}
		}
	}
	return cells
}

// testsIn adds the names of the tests in a directory to those of its package.
func testsIn(t *testing.T, known map[string]bool, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no tests in %s: %v", dir, err)
	}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") && f.Name.Name != "TestMain" {
				known[filepath.Base(dir)+"."+f.Name.Name] = true
			}
		}
	}
}

// knownTests returns the tests that the table may name.
func knownTests(t *testing.T) map[string]bool {
	t.Helper()
	known := map[string]bool{}
	testsIn(t, known, "../../runtime/internal/gpustate")
	dirs, err := os.ReadDir("..")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range dirs {
		if found, _ := filepath.Glob(filepath.Join("..", d.Name(), "*_test.go")); len(found) > 0 { // the pattern is sound
			testsIn(t, known, filepath.Join("..", d.Name()))
		}
	}
	return known
}

// faultsOf returns what is wrong with a table: cells that it says nothing of, or two things, and names
// that nothing has. open are its cells that lack a test.
func faultsOf(table []entry, known map[string]bool) (faults []string, open []cell) {
	said := map[cell]int{}
	for _, e := range table {
		proves, tests := e.not == "" && e.open == "", strings.Fields(e.tests)
		cells := cellsOf(e)
		if e.not != "" && e.open != "" || proves && len(tests) == 0 || e.open != "" && len(tests) > 0 {
			faults = append(faults, strings.Join([]string{e.outs, e.stores, e.backs, e.gpus}, " × ")+": neither tests, nor a reason, nor open; or two of these")
		}
		for _, test := range tests {
			if !known[test] {
				faults = append(faults, "there is no test "+test)
			}
		}
		for _, c := range cells {
			if said[c]++; said[c] == 2 {
				faults = append(faults, text(c)+": said twice")
			}
			if e.open != "" {
				open = append(open, c)
			}
		}
	}
	all := cellsOf(entry{})
	for _, c := range all {
		if said[c] == 0 {
			faults = append(faults, text(c)+": neither a test, nor a reason, nor open")
		}
	}
	for c := range said {
		if !slices.Contains(all, c) {
			faults = append(faults, text(c)+": no such pairing")
		}
	}
	return faults, open
}

func text(c cell) string { return strings.Join([]string{c.out, c.store, c.back, c.gpu}, " × ") }

// Each pairing has a test that is there, a reason, or an issue.
func TestTable(t *testing.T) {
	faults, open := faultsOf(table, knownTests(t))
	for _, fault := range faults {
		t.Error(fault)
	}
	t.Logf("%d of %d pairings are open:", len(open), len(cellsOf(entry{})))
	for _, c := range open {
		t.Log(text(c))
	}
}

// A hole is found, and so is a test that is renamed.
func TestFaultsOfATable(t *testing.T) {
	known := knownTests(t)
	for name, spoil := range map[string]func([]entry) []entry{
		"kept × disk × mover × same: neither a test": func(t []entry) []entry {
			return slices.DeleteFunc(t, func(e entry) bool { return e.outs == "kept" && e.backs == "mover" && e.stores == "disk" })
		},
		"window × tmpfs × image × other: said twice": func(t []entry) []entry {
			return append(t, entry{"window", "tmpfs", "image", "other", "", "once more", ""})
		},
		"there is no test suspend.TestNone": func(t []entry) []entry { t[1].tests = "suspend.TestNone"; return t },
		"no such pairing":                   func(t []entry) []entry { return append(t, entry{"drivr", "disk", "image", "same", "", "mistyped", ""}) },
		"or two of these":                   func(t []entry) []entry { t[1].tests = ""; return t },
	} {
		faults, _ := faultsOf(spoil(slices.Clone(table)), known)
		if len(faults) != 1 || !strings.Contains(faults[0], name) {
			t.Errorf("want a fault that says %q, got %q", name, faults)
		}
	}
}
