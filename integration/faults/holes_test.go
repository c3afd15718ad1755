// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"slices"
	"testing"
)

// Each place is in a phase and each fault of a kind. Where a phase has no fault of a kind there is a
// reason, and where it has one there is none.
func TestHoles(t *testing.T) {
	for _, p := range Places() {
		if !slices.ContainsFunc(phases, func(ph phase) bool { return ph.has(p) }) {
			t.Errorf("%v is in no phase", p)
		}
	}
	known := make(map[string]bool)
	for _, f := range Faults() {
		known[f.Name] = true
		if !slices.ContainsFunc(kinds, func(k kind) bool { return slices.Contains(k.faults, f.Name) }) {
			t.Errorf("%s is of no kind", f.Name)
		}
	}
	for _, k := range kinds {
		for _, name := range k.faults {
			if !known[name] {
				t.Errorf("the kind %q has a fault %s, which there is not", k.words, name)
			}
		}
		for _, ph := range phases {
			n, why := counts(k, ph), whyNone(k, ph)
			if n == 0 && len(why) != 1 {
				t.Errorf("%s, %s: there is no cell, and %d reasons", ph.words, k.words, len(why))
			}
			if n > 0 && len(why) > 0 {
				t.Errorf("%s, %s: there are %d cells, and a reason for none: %s", ph.words, k.words, n, reasons[why[0]].why)
			}
		}
	}
	for _, r := range reasons {
		for _, name := range r.phases {
			if !slices.ContainsFunc(phases, func(ph phase) bool { return ph.words == name }) {
				t.Errorf("a reason is of a phase %q", name)
			}
		}
		for _, name := range r.kinds {
			if !slices.ContainsFunc(kinds, func(k kind) bool { return k.words == name }) {
				t.Errorf("a reason is of a kind %q", name)
			}
		}
	}
}
