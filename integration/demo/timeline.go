// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// bar is how many columns stand for the whole time of an operation.
const bar = 30

// draw draws a line for each phase: its name, where it lies in the whole, its
// time and the bytes it moved.
func draw(t oplog.Entry) string {
	var b strings.Builder
	for _, p := range t.Phases {
		from := min(column(p.Start, t.Took), bar-1)
		to := max(from+1, column(p.Start+p.Took, t.Took))
		line := strings.Repeat(" ", from) + strings.Repeat("=", to-from)
		text := fmt.Sprintf("    %-20s |%-*s| %10s %10s", p.Name, bar, line, duration(p.Took), size(p.Bytes))
		b.WriteString(strings.TrimRight(text, " ") + "\n")
	}
	return b.String()
}

// column scales a time to the bar.
func column(at, whole time.Duration) int {
	if whole <= 0 {
		return 0
	}
	return min(bar, int((int64(at)*bar+int64(whole)/2)/int64(whole)))
}
