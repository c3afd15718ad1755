// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/docs/commands"
)

// Each command line of the documents is run by a test, or a reason is known why it is not.
func TestEveryLine(t *testing.T) {
	run, used := make(map[string]bool), make([]bool, len(commands.Others))
	count := 0
	for _, path := range paths(t) {
		for _, l := range linesOf(t, path) {
			count++
			known := false
			for i, o := range commands.Others {
				if o.Covers(l) {
					used[i], known = true, true
				}
			}
			for _, s := range commands.Sessions {
				if s.Is(l) {
					run[l.Document+", "+l.Section], known = true, true
				}
			}
			if !known {
				t.Errorf("%s:%d: nothing says which test runs %q: name its section, %q, in commands.Sessions, so that integration/documents runs it, or a test or a reason in commands.Others (docs/commands/table.go)", path, l.Number, l.Text, l.Section)
			}
		}
	}
	if count < 150 {
		t.Errorf("only %d command lines were found", count)
	}
	for i, o := range commands.Others {
		if !used[i] {
			t.Errorf("no line of the documents is what this is about: %+v", o)
		}
		if (o.Test == "") == (o.Reason == "") {
			t.Errorf("neither test nor reason, or both: %+v", o)
		}
		if file, function, ok := strings.Cut(o.Test, ":"); ok {
			data, err := os.ReadFile(filepath.Join("..", file))
			if err != nil || !strings.Contains(string(data), "\nfunc "+function+"(") {
				t.Errorf("there is no %s: %v", o.Test, err)
			}
		}
	}
	for _, s := range commands.Sessions {
		for _, section := range s.Sections {
			if !run[s.Document+", "+section] {
				t.Errorf("%s has no commands in a section %q", s.Document, section)
			}
		}
	}
}

// What the documents have made, make knows.
func TestMake(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, path := range paths(t) {
		for _, l := range linesOf(t, path) {
			words := strings.Fields(l.Text)
			if words[0] != "make" {
				continue
			}
			for _, word := range words[1:] {
				if strings.Contains(word, "=") {
					break // variables, to the end of the line
				}
				checked++
				if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(word) + `:`).Match(makefile) {
					t.Errorf("%s:%d: make has no %s", path, l.Number, word)
				}
			}
		}
	}
	if checked < 20 {
		t.Errorf("only %d targets were found", checked)
	}
}

func linesOf(t *testing.T, path string) []commands.Line {
	t.Helper()
	lines, err := commands.Of(path)
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// paths are the documents with commands for users.
func paths(t *testing.T) []string {
	t.Helper()
	found, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	internals, err := filepath.Glob("internals/*.md")
	if err != nil {
		t.Fatal(err)
	}
	return append(append(found, internals...), "../README.md", "../CONTRIBUTING.md")
}
