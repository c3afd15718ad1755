// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import "testing"

func TestCRIULines(t *testing.T) {
	for _, test := range []struct {
		what  string
		name  string
		value any
		want  string
		err   string
	}{
		{what: "on", name: "tcp-established", value: true, want: "tcp-established\n"},
		{what: "off", name: "tcp-established", value: false, want: ""},
		{what: "number", name: "ghost-limit", value: int64(-1), want: "ghost-limit -1\n"},
		{what: "text", name: "network-lock", value: "nftables", want: "network-lock nftables\n"},
		{what: "a space", name: "libdir", value: "/a dir", want: "libdir \"/a dir\"\n"},
		{what: "list", name: "external", value: []any{"a", "b c"}, want: "external a\nexternal \"b c\"\n"},
		{what: "empty list", name: "external", value: []any{}, want: ""},
		{what: "no name", value: true, err: "is not a name"},
		{what: "name of two words", name: "a b", value: true, err: "not a name"},
		{what: "name with a line feed", name: "a\nb", value: true, err: "not a name"},
		{what: "comment as name", name: "#a", value: true, err: "not a name"},
		{what: "capitals", name: "A", value: true, err: "not a name"},
		{what: "empty text", name: "a", value: "", err: "is empty"},
		{what: "second line", name: "a", value: "b\naction-script /evil", err: "control characters"},
		{what: "carriage return", name: "a", value: "b\rc", err: "control characters"},
		{what: "tab", name: "a", value: "b\tc", err: "control characters"},
		{what: "zero byte", name: "a", value: "b\x00c", err: "control characters"},
		{what: "delete", name: "a", value: "b\x7f", err: "control characters"},
		{what: "quote", name: "a", value: `b" c`, err: "quotes"},
		{what: "single quote", name: "a", value: "b'", err: "quotes"},
		{what: "comment", name: "a", value: "b #c", err: "quotes"},
		{what: "backslash", name: "a", value: `b\`, err: "backslash"},
		{what: "fraction", name: "a", value: 1.5, err: "neither"},
		{what: "table", name: "a", value: map[string]any{"b": true}, err: "neither"},
		{what: "nothing", name: "a", value: nil, err: "neither"},
		{what: "list of numbers", name: "a", value: []any{int64(1)}, err: "strings only"},
		{what: "list with an evil one", name: "a", value: []any{"b", "c\nd"}, err: "control characters"},
	} {
		t.Run(test.what, func(t *testing.T) {
			got, err := CRIULines(test.name, test.value)
			wantError(t, err, test.err)
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
