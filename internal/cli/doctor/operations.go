// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"strings"
	"time"

	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// operationsSeen is how many of the last operations CheckOperations looks at.
const operationsSeen = 20

// CheckOperations tells how the node's last operations went, by the log in a directory. It warns if
// the last one failed.
func CheckOperations(dir string, now time.Time) Check {
	c := Check{Area: "operations", Name: "last", Status: OK, Found: "none yet"}
	entries, err := oplog.Read(dir)
	if err != nil {
		c.Status, c.Found, c.Problem = Warning, "unknown", err.Error()
		return c
	}
	entries = entries[max(0, len(entries)-operationsSeen):]
	if len(entries) == 0 {
		return c
	}
	failed := 0
	for _, e := range entries {
		if e.Failed != "" {
			failed++
		}
	}
	last := entries[len(entries)-1]
	ago := units.HumanDuration(now.Sub(last.Began.Add(last.Took)))
	c.Found = fmt.Sprintf("%d of the last %d failed; the last, %s of %s/%s, ended %s ago", failed, len(entries), last.Operation, last.Namespace, last.Container, strings.ToLower(ago))
	if last.Failed != "" {
		c.Status, c.Problem, c.Fix = Warning, fmt.Sprintf("it failed at the step %s: %s", last.Failed, last.Error), "gpuckpt report"
	}
	return c
}
