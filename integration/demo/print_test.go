// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

func TestCommand(t *testing.T) {
	long := strings.Repeat("x", 60)
	for _, c := range []struct{ line, want string }{
		{"ctr tasks delete c", "$ ctr tasks delete c\n"},
		{"ctr tasks start --detach c", "$ ctr tasks start --detach c\n"},
		{"ctr tasks start --log-uri " + long, "$ ctr tasks start \\\n      --log-uri " + long + "\n"},
		{"ctr run --net-host " + long + " c", "$ ctr run \\\n      --net-host " + long + " \\\n      c\n"},
	} {
		if got := command(c.line); got != c.want {
			t.Errorf("command(%q):\n%swant\n%s", c.line, got, c.want)
		}
	}
}

// A command is as wide as the terminal at most, and typing it gives the same words.
func TestCommandFits(t *testing.T) {
	line := "ctr " + strings.Repeat("--option value word ", 20) + "end"
	got := command(line)
	for text := range strings.Lines(got) {
		if n := len(strings.TrimSuffix(text, "\n")); n > columns {
			t.Errorf("a line of %d columns: %s", n, text)
		}
	}
	typed := strings.ReplaceAll(strings.TrimPrefix(got, "$ "), "\\\n", "")
	if strings.Join(strings.Fields(typed), " ") != line {
		t.Errorf("other words than\n%s\n%s", line, got)
	}
}

func TestDraw(t *testing.T) {
	got := draw(oplog.Entry{Took: 300 * time.Millisecond, Phases: []images.Phase{
		{Name: "first", Took: 100 * time.Millisecond, Bytes: 3 << 20},
		{Name: "instant", Start: 100 * time.Millisecond, Took: time.Microsecond},
		{Name: "last", Start: 100 * time.Millisecond, Took: 200 * time.Millisecond, Bytes: 5 << 30},
		{Name: "beyond", Start: 300 * time.Millisecond, Took: time.Hour},
	}})
	want := `    first                |==========                    |   100.0 ms       3MiB
    instant              |          =                   |     0.0 ms
    last                 |          ====================|   200.0 ms       5GiB
    beyond               |                             =|   3600.0 s
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}
