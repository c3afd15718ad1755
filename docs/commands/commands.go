// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package commands reads the command lines of the documents, and knows which test runs each, or why
// none does. A test of package docs requires one or the other for each line.
package commands

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Line is a command line in a document.
type Line struct {
	Document, Section string // "gpu-host.md", "5. Run a container"
	Number            int
	Text              string // without its comment
	prompted          bool   // it begins with "$ ", at the margin
}

// Of returns the command lines of a document. A block of code has a command in each line if it is
// marked as sh or not at all, or only in the lines that begin with "$ ", if there are any.
func Of(path string) (found []Line, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read a document: %w", err)
	}
	comment := regexp.MustCompile(`(^|\s+)# .*$`)
	section, kind := "", ""
	var block []Line
	inside := false
	for i, text := range strings.Split(string(data), "\n") {
		trimmed := strings.TrimSpace(text)
		switch mark, fence := strings.CutPrefix(trimmed, "```"); {
		case fence && !inside:
			inside, kind, block = true, mark, nil
		case fence:
			inside = false
			if kind == "" || kind == "sh" {
				found = append(found, prompted(block)...)
			}
		case inside:
			if command := comment.ReplaceAllString(trimmed, ""); command != "" {
				block = append(block, Line{filepath.Base(path), section, i + 1, command, strings.HasPrefix(text, "$ ")})
			}
		case strings.HasPrefix(text, "#"):
			section = strings.TrimLeft(text, "# ")
		}
	}
	return found, nil
}

// prompted returns the lines of a block that begin with "$ ", without it, or all if none does.
func prompted(block []Line) (found []Line) {
	for _, l := range block {
		if l.prompted {
			l.Text = strings.TrimPrefix(l.Text, "$ ")
			found = append(found, l)
		}
	}
	if found == nil {
		return block
	}
	return found
}
