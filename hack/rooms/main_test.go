// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	two := []string{"runtime", "internal/cli/doctor"}
	rooms := []room{
		{name: "cmd/gpuckpt", ours: []string{"runtime", "images/oci", "internal/node/proc", "cmd/gpuckpt/internal/own"}},
		{name: "cmd/gpuckpt/internal/own", importers: []string{"cmd/gpuckpt"}},
		{name: "runtime", ours: []string{"internal/criu", "cuda"}},
		{name: "runtime/internal/hooks", importers: []string{"runtime"}},
		{name: "internal/criu", ours: []string{"images", "internal/node/proc"}, importers: two},
		{name: "internal/node/proc", importers: two},
		{name: "internal/node/worker", ours: []string{"internal/node/proc"}, importers: two},
		{name: "internal/cli/doctor", importers: []string{"cmd/gpuckpt"}},
		{name: "cuda", ours: []string{"cuda/internal/wire", "internal/node/worker"}},
		{name: "cuda/internal/wire", importers: []string{"cuda", "cuda/driver"}},
		{name: "images", names: maxNames},
		{name: "images/oci", ours: []string{"images"}, importers: []string{"runtime"}},
	}
	if faults := check(rooms); len(faults) > 0 {
		t.Errorf("a house with walls: %q", faults)
	}
	for _, test := range []struct {
		room  room
		fault string
	}{
		{room{name: "images/a", names: maxNames + 1}, "exports"},
		{room{name: "runtime", ours: []string{"cmd/gpuckpt"}}, "nothing imports a program"},
		{room{name: "internal/criu/a", ours: []string{"runtime"}, importers: two}, "points up"},
		{room{name: "internal/node/a", ours: []string{"internal/criu"}, importers: two}, "points up"},
		{room{name: "internal/operation/a", importers: []string{"runtime"}}, "move it below runtime"},
		{room{name: "internal/new/a", ours: []string{"internal/node/proc"}, importers: two}, "on no floor"},
		{room{name: "cuda", ours: []string{"images"}}, "do not import each other"},
		{room{name: "cdi", ours: []string{"cuda/internal/wire"}}, "do not import each other"},
		{room{name: "images", ours: []string{"images/oci"}}, "points up"},
		{room{name: "images/oci", ours: []string{"internal/criu"}}, "only leaves"},
	} {
		faults := check(append([]room{test.room}, rooms...))
		if len(faults) != 1 || !strings.Contains(faults[0], test.fault) {
			t.Errorf("%+v: %q, want one with %q", test.room, faults, test.fault)
		}
	}
	many := rooms
	for name := range strings.SplitSeq("abcdefghi", "") {
		many = append(many, room{name: "internal/" + name})
	}
	if faults := check(many); len(faults) != 1 || !strings.Contains(faults[0], "folders") {
		t.Errorf("many folders: %q", faults)
	}
}

// What a declaration gives to its package: functions, types, variables and constants, no methods.
func TestDeclared(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\nfunc F() {}\nfunc (T) M() {}\ntype T int\nconst A, B = 1, 2\nvar V int\n", 0)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range file.Decls {
		for _, id := range declared(d) {
			got = append(got, id.Name)
		}
	}
	if strings.Join(got, " ") != "F T A B V" {
		t.Errorf("declared: %q", got)
	}
}
