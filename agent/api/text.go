// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
	"unicode"
)

// MostText is how many bytes of a text a condition or an event has.
const MostText = 4096

// Text returns a text as a condition or an event has it, whoever wrote parts of it, such as a registry:
// valid, without what commands a terminal, and without its middle if it is long.
func Text(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsGraphic(r) && r != '\n' {
			return unicode.ReplacementChar
		}
		return r
	}, text)
	if len(text) <= MostText {
		return text
	}
	const half = MostText/2 - 8
	return strings.ToValidUTF8(text[:half], "") + " … " + strings.ToValidUTF8(text[len(text)-half:], "")
}
