// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/oplog"
)

// What the shims have done, and what failed, is in the log of operations: as metrics, as a list, as a picture.
func TestReport(t *testing.T) {
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{ID: "job"}, "counter")
	k.Expect(t, "next", "101")
	gpuckpt(t, c, "checkpoint", "job", "--image", "gpuckpt.test/report:1", "--leave-running")
	gpuckpt(t, c, "suspend", "job")
	gpuckpt(t, c, "resume", "job")
	gpuckpt(t, c, "suspend", "job")
	refused := start(t, c, harness.RunSpec{ID: "refused"}, "managed")
	refused.Expect(t, "next", "101")
	if _, _, err := try(t, c, nil, "checkpoint", "refused", "--image", "gpuckpt.test/report:2"); err == nil {
		t.Error("a checkpoint of managed memory")
	}

	state := filepath.Join(c.Bundle("job"), "../../..")
	text := gpuckpt(t, c, "metrics", "--state", state)
	for _, line := range []string{
		`gpuckpt_operations_total{operation="checkpoint",outcome="success"} 1`,
		`gpuckpt_operations_total{operation="suspend",outcome="success"} 2`,
		`gpuckpt_failures_total{operation="checkpoint",step="`,
		`gpuckpt_phase_seconds_count{operation="checkpoint",phase="dump"} 1`,
		`gpuckpt_bytes_total{operation="checkpoint",phase="save GPU state"} `,
		"gpuckpt_suspended_containers 1\n", "gpuckpt_suspended_gpus 1\n",
	} {
		if !strings.Contains(text, line) {
			t.Errorf("no %s in\n%s", line, text)
		}
	}
	all := asJSON[[]oplog.Entry](t, c, "report")
	if len(all) != 5 || all[0].Operation != "checkpoint" || all[0].Namespace != c.Namespace() || all[4].Container != "refused" || all[4].Failed == "" {
		t.Errorf("%+v", all)
	}
	if list := gpuckpt(t, c, "report", "refused"); !strings.Contains(list, "failed: ") || strings.Contains(list, "suspend") {
		t.Error(list)
	}
	picture := filepath.Join(t.TempDir(), "job.svg")
	gpuckpt(t, c, "report", "job", "--svg", picture)
	svg, err := os.ReadFile(picture)
	if err != nil || strings.Count(string(svg), "checkpoint of job at") != 1 || strings.Count(string(svg), "suspend of job at") != 2 {
		t.Errorf("%v, %s", err, svg)
	}
}
