// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	rooms := []room{
		{name: "cmd/gpuckpt", ours: []string{"runtime", "images/oci", "internal/proc"}},
		{name: "runtime", ours: []string{"internal/criu", "cuda"}},
		{name: "internal/criu", ours: []string{"images", "internal/proc"}},
		{name: "internal/proc"},
		{name: "internal/worker", ours: []string{"internal/proc"}},
		{name: "cuda", ours: []string{"cuda/internal/wire", "internal/worker"}},
		{name: "cuda/internal/wire"},
		{name: "images", files: maxFiles, lines: maxLines, methods: maxMethods},
		{name: "images/oci", ours: []string{"images"}},
	}
	if faults := check(rooms); len(faults) > 0 {
		t.Errorf("a house with walls: %q", faults)
	}
	for _, test := range []struct {
		room  room
		fault string
	}{
		{room{name: "a", files: maxFiles + 1}, "files"},
		{room{name: "a", lines: maxLines + 1}, "lines"},
		{room{name: "a", widest: "Type", methods: maxMethods + 1}, "a.Type has"},
		{room{name: "runtime", ours: []string{"cmd/gpuckpt"}}, "nothing imports a program"},
		{room{name: "internal/a", ours: []string{"runtime"}}, "points up"},
		{room{name: "cuda", ours: []string{"images"}}, "do not import each other"},
		{room{name: "cdi", ours: []string{"cuda/internal/wire"}}, "do not import each other"},
		{room{name: "images", ours: []string{"images/oci"}}, "points up"},
		{room{name: "images/oci", ours: []string{"internal/criu"}}, "only leaves"},
	} {
		faults := check(append([]room{test.room}, rooms[2:]...))
		if len(faults) != 1 || !strings.Contains(faults[0], test.fault) {
			t.Errorf("%+v: %q, want one with %q", test.room, faults, test.fault)
		}
	}
}
