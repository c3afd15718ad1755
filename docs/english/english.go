// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package english finds what makes the project's texts hard to read: long sentences, and words that a
// reader of another first language stumbles over. Tests ask it about the documents and the help texts.
package english

import (
	"fmt"
	"regexp"
	"strings"
)

// Longest is how many words a sentence may have.
const Longest = 25

// words are what a text must not have, and what to say in their place.
var words = []struct {
	pattern *regexp.Regexp
	better  string
}{
	{regexp.MustCompile(`(?i)\b(go|goes|going|gone|went) on\b`), "continues, keeps running"},
	{regexp.MustCompile(`(?i)\bbeside\b`), "while, next to, with, compared with"},
	{regexp.MustCompile(`(?i)\b(keys?|signatures?) (that |which )?counts?\b|\bone (which )?counts?\b|\bthat counts? (here|on (this|the) node)\b`), "is trusted"},
	{regexp.MustCompile(`(?i)\bout and (back )?in\b`), "checkpoint and restore"},
	{regexp.MustCompile(`(?i)\bas ever\b`), "as before"},
	{regexp.MustCompile(`(?i)\b(the|its) begin\b`), "the start"},
	{regexp.MustCompile(`(?i)\bways? back\b`), "undo"},
	{regexp.MustCompile(`(?i)\bthe house('s)?\b`), "the project"},
	{regexp.MustCompile(`(?i)\bdoors?\b`), "API, way"},
	{regexp.MustCompile(`(?i)\bmend(s|ed|ing)?\b`), "fix, repair"},
	{regexp.MustCompile(`(?i)\bin (the|its) place of\b`), "instead of"},
	{regexp.MustCompile(`(?i)\bgraver\b`), "worse"},
}

var (
	span    = regexp.MustCompile("`[^`]*`")
	link    = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	picture = regexp.MustCompile(`!\[[^\]]*\]\([^)]*\)`)
	end     = regexp.MustCompile(`([.!?;]\**\)?(\s+|$)|→)`)
)

// Faults says what is wrong with a paragraph, a cell of a table or a help text.
func Faults(text string) (found []string) {
	text = picture.ReplaceAllString(text, "")
	text = link.ReplaceAllString(text, "$1")
	text = span.ReplaceAllString(text, "CODE")
	for _, w := range words {
		for _, match := range w.pattern.FindAllString(text, -1) {
			found = append(found, fmt.Sprintf("%q: say %s", match, w.better))
		}
	}
	for _, sentence := range end.Split(text, -1) {
		if n := len(strings.Fields(sentence)); n > Longest {
			found = append(found, fmt.Sprintf("%d words, at most %d: %q", n, Longest, strings.TrimSpace(sentence)))
		}
	}
	return found
}

// Paragraphs calls f with each paragraph, item, heading and cell of a document, and the number of its
// first line. Blocks of code are left out.
func Paragraphs(document string, f func(number int, text string)) {
	var lines []string
	begin, code := 0, false
	flush := func() {
		if len(lines) > 0 {
			f(begin, strings.Join(lines, " "))
		}
		lines = nil
	}
	item := regexp.MustCompile(`^([-*]|\d+\.) `)
	for i, line := range strings.Split(document, "\n") {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "```"):
			code = !code
			flush()
		case code:
		case line == "", strings.HasPrefix(line, "<"):
			flush()
		case strings.HasPrefix(line, "|"):
			flush()
			for cell := range strings.SplitSeq(line, " | ") {
				f(i+1, strings.Trim(cell, "| "))
			}
		case strings.HasPrefix(line, "#"):
			flush()
			f(i+1, strings.TrimLeft(line, "# "))
		default:
			if item.MatchString(line) {
				flush()
			}
			if len(lines) == 0 {
				begin = i + 1
			}
			lines = append(lines, line)
		}
	}
	flush()
}
