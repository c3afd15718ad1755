// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

func TestOperations(t *testing.T) {
	dir, now := t.TempDir(), time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	is := func(status Status, words ...string) {
		t.Helper()
		c := CheckOperations(dir, now)
		text := c.Found + "\n" + c.Problem + "\n" + c.Fix
		for _, word := range words {
			if c.Status != status || !strings.Contains(text, word) {
				t.Errorf("%s: no %q, or not %s, in\n%s", c.Status, word, status, text)
			}
		}
	}
	is(OK, "none yet")
	add := func(failed string) {
		t.Helper()
		e := oplog.Entry{Operation: "checkpoint", Namespace: "default", Container: "job", Began: now.Add(-2 * time.Hour), Took: time.Hour}
		if failed != "" {
			e.Failed, e.Error = failed, "no space left on device"
		}
		if err := oplog.Append(dir, e); err != nil {
			t.Fatal(err)
		}
	}
	add("")
	is(OK, "0 of the last 1 failed", "checkpoint of default/job", "about an hour ago")
	add("dump")
	is(Warning, "1 of the last 2 failed", "step dump: no space left on device", "gpuckpt report")
	for range operationsSeen { // what was earlier no longer counts
		add("")
	}
	is(OK, "0 of the last 20 failed")
}
