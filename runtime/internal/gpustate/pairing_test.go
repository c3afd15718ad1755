// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/images"
)

func TestGPUTries(t *testing.T) {
	pair := func(from, to string) cdi.Pair { return cdi.Pair{Old: cdi.GPU{UUID: from}, New: cdi.GPU{UUID: to}} }
	for _, test := range []struct {
		name    string
		pairs   []cdi.Pair
		granted int
		uses    []string
		want    string
	}{
		{"nothing changed", []cdi.Pair{pair("a", "a")}, 1, []string{"a"}, "none; a=a"},
		{"moved", []cdi.Pair{pair("a", "b")}, 1, []string{"a"}, "a=b"},
		{"moved where more are granted", []cdi.Pair{pair("a", "b")}, 2, []string{"a"}, "a=b"},
		{"the same where more are granted", []cdi.Pair{pair("a", "a")}, 2, []string{"a"}, "a=a; none"},
		{"one of the container's two", []cdi.Pair{pair("a", "b"), pair("b", "a")}, 2, []string{"b"}, "b=a; a=b,b=a"},
		{"both", []cdi.Pair{pair("a", "b"), pair("b", "a")}, 2, []string{"a", "b"}, "a=b,b=a"},
		{"not known", []cdi.Pair{pair("a", "b")}, 1, nil, "a=b"},
		{"none", nil, 0, nil, "none"},
	} {
		r := &Restoration{metadata: &images.Metadata{Processes: []images.Process{{PID: 7, GPUs: test.uses}}}, pairs: test.pairs, granted: test.granted}
		var sets []string
		for _, set := range r.tries()[7] {
			var words []string
			for _, p := range set {
				words = append(words, p.Old+"="+p.New)
			}
			if set == nil {
				words = []string{"none"}
			}
			sets = append(sets, strings.Join(words, ","))
		}
		if got := strings.Join(sets, "; "); got != test.want {
			t.Errorf("%s: tries %q, want %q", test.name, got, test.want)
		}
	}
}
