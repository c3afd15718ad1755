// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package visible

import (
	"bytes"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestText(t *testing.T) {
	for text, want := range map[string]string{
		"":                              "",
		"Größe 模型 🚀\u00a0e\u0301":       "Größe 模型 🚀\u00a0e\u0301",
		`C:\new "quoted"`:               `C:\new "quoted"`,
		"caf\xe9.pt":                    `caf\xe9.pt`,
		"\x1b]0;pwned\a\nlevel=fatal\t": `\x1b]0;pwned\a\nlevel=fatal\t`,
		"\x00\x7f\u0085\u202e\u2028":    `\x00\x7f\u0085\u202e\u2028`,
		"\xed\xa0\x80\xf4\x90":          `\xed\xa0\x80\xf4\x90`,
		"'":                             "'",
	} {
		got := Text(text)
		if got != want || Text(got) != got {
			t.Errorf("%q became %q, then %q", text, got, Text(got))
		}
	}
}

// The begin of a long text is shown, and its end.
func TestLongText(t *testing.T) {
	for _, middle := range []string{"x", "\xff", "模", "\u202e"} {
		text := "checkpoint: " + strings.Repeat(middle, 1<<20) + ": no room"
		got := Text(text)
		if len(got) > Most || !seen(got) || Text(got) != got || !strings.HasPrefix(got, "checkpoint: ") || !strings.HasSuffix(got, ": no room") || !strings.Contains(got, " … ") {
			t.Errorf("%q a million times became %d bytes: %.40q", middle, len(got), got)
		}
	}
}

// everyByte has each byte alone, and between letters.
func everyByte() (texts []string) {
	for b := range 256 {
		texts = append(texts, string([]byte{byte(b)}), "a"+string([]byte{byte(b)})+"b")
	}
	return texts
}

func seen(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsGraphic(r) })
}

// A terminal gets lines, and nothing that commands it.
func TestWriter(t *testing.T) {
	for _, bad := range everyByte() {
		var out bytes.Buffer
		n, err := Writer(&out).Write([]byte("name:\t" + bad + "\n"))
		if err != nil || n != len(bad)+7 {
			t.Fatal(n, err)
		}
		if !seen(strings.NewReplacer("\n", "", "\t", "").Replace(out.String())) {
			t.Errorf("%q was written as %q", bad, out.String())
		}
	}
}
