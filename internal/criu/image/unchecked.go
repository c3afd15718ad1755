// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build gpuckpt_unchecked

package image

import (
	"os"
	"slices"
	"strings"
	"sync"
)

// Without reports whether a rule is left out. This is a build for tests, in which what comes after the
// checks can be seen at work: it leaves out the rules in the file that GPUCKPT_WITHOUT names, one a
// line, or all of them without such a file.
func Without(rule string) bool {
	rules := without()
	return rules == nil || slices.Contains(rules, rule)
}

var without = sync.OnceValue(func() []string {
	data, err := os.ReadFile(os.Getenv("GPUCKPT_WITHOUT"))
	if err != nil {
		return nil
	}
	return append(strings.Split(strings.TrimSpace(string(data)), "\n"), "-")
})
