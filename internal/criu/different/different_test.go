// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package different

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
)

// What the table says can be noted and read, in words of one line that an event can list.
func TestParse(t *testing.T) {
	var text strings.Builder
	var want []string
	for _, k := range Kinds {
		want = append(want, k.String())
		text.WriteString(k.String() + "\n")
		if strings.Contains(k.String(), Separator) {
			t.Errorf("%q has %q", k, Separator)
		}
	}
	if got, err := parse(strings.NewReader(text.String())); err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
	for _, bad := range []string{"a\n\nb\n", "\x1b[2J\n", strings.Repeat("a\n", mostLines+1), strings.Repeat("a", longest+1)} {
		if got, err := parse(strings.NewReader(bad)); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%.20q is %.20q, %v", bad, got, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("a: b\n")
	f.Fuzz(func(_ *testing.T, text string) { _, _ = parse(strings.NewReader(text)) })
}
