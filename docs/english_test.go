// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/docs/english"
)

// unfinished are pages with faults, and how many are left: none may be added.
var unfinished = map[string]int{}

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
		if len(faults) > unfinished[path] {
			t.Errorf("%d faults, at most %d:\n%s", len(faults), unfinished[path], strings.Join(faults, "\n"))
		}
	}
}
