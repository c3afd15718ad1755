// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/docs/english"
)

// mostWords are what the pages for users may have in all, without what is written out of code and results.
const mostWords = 28_000

// Who uses gpuckpt has no more to read. What is new pays with what can go; what a maintainer needs is in
// docs/internals.
func TestWords(t *testing.T) {
	words := 0
	for path, text := range documents(t) {
		if path == "compatibility.md" {
			_, text, _ = strings.Cut(text, "\n## Recipes")
		}
		if path == "../README.md" || !strings.Contains(path, "/") && path != "reference.md" {
			words += len(strings.Fields(text))
		}
	}
	if words > mostWords || words < mostWords/2 {
		t.Errorf("the pages for users have %d words, at most %d", words, mostWords)
	}
}

// The documents are plain English, as far as a program can tell.
func TestEnglish(t *testing.T) {
	for path, text := range documents(t) {
		if strings.HasPrefix(path, "results/") || strings.HasPrefix(path, "decisions/") || strings.HasPrefix(path, "../integration/") || strings.HasPrefix(path, "../hack/") {
			continue // as it was written then, and notes for who works there
		}
		var faults []string
		english.Paragraphs(text, func(number int, paragraph string) {
			for _, fault := range english.Faults(paragraph) {
				faults = append(faults, fmt.Sprintf("%s:%d: %s", path, number, fault))
			}
		})
		if len(faults) > 0 {
			t.Errorf("%d faults:\n%s", len(faults), strings.Join(faults, "\n"))
		}
	}
}
