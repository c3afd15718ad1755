// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package visible makes text valid and visible where it leaves: in errors, events, the log of
// operations and on terminals.
//
// Names of files and processes come from containers and images, and are any bytes. Errors quote them.
// Bytes that are not UTF-8 end a connection of ttrpc's; a line break forges a line of a log; an escape
// sequence commands a terminal. So nothing else looks at the bytes of a text, and whatever sends one
// calls this package. A text that has been through it once is not changed again.
package visible

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Most is how many bytes of a text are shown. An error may quote an annotation of 256 kB, or a name for
// each of a million files; the log of operations and events have no room for that.
const Most = 8 << 10

// Text returns a text as UTF-8 in which each character can be seen: bytes that are not UTF-8, control
// characters and others that change what is around them are written as in a Go string, such as \xff,
// \n and \u202e. Backslashes and quotes stay. A text of more than Most bytes loses its middle: an error
// begins with what was done, and ends with the cause.
func Text(text string) string {
	if len(text) > 2*Most { // it gets no shorter
		text = text[:Most] + text[len(text)-Most:]
	}
	seen := escape(text, "")
	if len(seen) <= Most {
		return seen
	}
	const half = Most/2 - 8
	return strings.ToValidUTF8(seen[:half], "") + " … " + strings.ToValidUTF8(seen[len(seen)-half:], "")
}

func escape(text, keep string) string {
	var out strings.Builder
	for at := 0; at < len(text); {
		r, n := utf8.DecodeRuneInString(text[at:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&out, `\x%02x`, text[at])
		case strconv.IsGraphic(r) || strings.ContainsRune(keep, r):
			out.WriteRune(r)
		default:
			out.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		}
		at += n
	}
	return out.String()
}

type writer struct{ to io.Writer }

// Writer returns a writer for a terminal, which gets lines of visible text: line breaks and tabs stay.
// A character that is cut in two by two writes is written as bytes.
func Writer(to io.Writer) io.Writer { return writer{to} }

func (w writer) Write(text []byte) (int, error) {
	if _, err := io.WriteString(w.to, escape(string(text), "\n\t")); err != nil {
		return 0, err
	}
	return len(text), nil
}
