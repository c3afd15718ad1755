// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// What others wrote is valid, harmless on a terminal and short.
func TestText(t *testing.T) {
	for b := range 256 {
		got := Text("a " + string([]byte{byte(b)}) + " b")
		if !utf8.ValidString(got) || strings.ContainsAny(got, "\x00\a\b\r\x1b\u0085") || !strings.HasPrefix(got, "a ") || !strings.HasSuffix(got, " b") {
			t.Errorf("byte %#02x became %q", b, got)
		}
	}
	for _, middle := range []string{"x", "\xff", "模"} {
		got := Text("push: " + strings.Repeat(middle, 1<<20) + ": denied")
		if len(got) > MostText || !utf8.ValidString(got) || !strings.HasPrefix(got, "push: ") || !strings.HasSuffix(got, ": denied") {
			t.Errorf("%q a million times became %d bytes", middle, len(got))
		}
	}
}
