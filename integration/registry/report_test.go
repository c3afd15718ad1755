// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// What the shims have done, and what failed, is in the log of operations: as metrics, as a list, as
// pictures and as spans; and gpuckpt ps has what was done last. What they print is kept with the results.
func TestReport(t *testing.T) {
	results.Add(t)
	c := session.Own(t, harness.Options{})
	const ref, again = "gpuckpt.test/report:1", "gpuckpt.test/report:2"
	k := start(t, c, harness.RunSpec{ID: "job"}, "pattern", "--bytes", session.Sizes(t)[0].Arg())
	gpuckpt(t, c, "checkpoint", "job", "--image", ref, "--leave-running")
	gpuckpt(t, c, "suspend", "job")
	gpuckpt(t, c, "resume", "job")
	gpuckpt(t, c, "checkpoint", "job", "--image", again)
	k.MustRemove(t)
	k = start(t, c, harness.RunSpec{ID: "job", Image: again, Port: k.Port, Args: []string{"gpuwork"}, Annotations: map[string]string{"dev.gpuckpt.restore": "true"}})
	k.Answer(t, "info")
	refused := start(t, c, harness.RunSpec{ID: "refused"}, "managed")
	refused.Expect(t, "next", "101")
	if _, _, err := try(t, c, nil, "checkpoint", "refused", "--image", "gpuckpt.test/report:3"); err == nil {
		t.Error("a checkpoint of managed memory")
	}
	keep(t, "ps.txt", gpuckpt(t, c, "ps"))
	gpuckpt(t, c, "suspend", "job")
	ps := gpuckpt(t, c, "ps")
	if words := strings.Join(strings.Fields(ps), " "); !strings.Contains(words, "job suspended 1 0B suspend") || !strings.Contains(words, "refused running 1") || !strings.Contains(words, " ago the last try failed: ") {
		t.Error(ps)
	}
	keep(t, "ps-suspended.txt", ps)
	allowed := c.Configured(t, "[restore]\npolicy = \"never\"")
	start(t, c, harness.RunSpec{ID: "cold", Image: again, Annotations: map[string]string{"dev.gpuckpt.restore": "prefer"}}, "counter").Expect(t, "count", "101")
	allowed()

	state := filepath.Join(c.Bundle("job"), "../../..")
	text := gpuckpt(t, c, "metrics", "--state", state)
	for _, line := range []string{
		`gpuckpt_operations_total{operation="checkpoint",outcome="success"} 2`,
		`gpuckpt_operations_total{operation="restore",outcome="success"} 1`,
		`gpuckpt_operations_total{operation="restore",outcome="afresh"} 1`,
		`gpuckpt_operations_total{operation="suspend",outcome="success"} 2`,
		`gpuckpt_failures_total{operation="checkpoint",step="`,
		`gpuckpt_phase_seconds_count{operation="checkpoint",phase="dump"} 2`,
		`gpuckpt_bytes_total{operation="checkpoint",phase="save GPU state"} `,
		"gpuckpt_suspended_containers 1\n", "gpuckpt_suspended_gpus 1\n",
	} {
		if !strings.Contains(text, line) {
			t.Errorf("no %s in\n%s", line, text)
		}
	}
	keep(t, "metrics.prom", text)
	all := asJSON[[]oplog.Entry](t, c, "report")
	if len(all) != 8 || all[0].Operation != "checkpoint" || all[0].Namespace != c.Namespace() || all[4].Operation != "restore" || all[5].Container != "refused" || all[5].Failed == "" || all[7].Container != "cold" || !all[7].Afresh() {
		t.Errorf("%+v", all)
	}
	if list := gpuckpt(t, c, "report", "cold"); !strings.Contains(list, "started afresh: ") || !strings.Contains(list, "this node allows none") {
		t.Error(list)
	}
	if list := gpuckpt(t, c, "report", "refused"); !strings.Contains(list, "failed: ") || strings.Contains(list, "suspend") {
		t.Error(list)
	}
	keep(t, "report.txt", gpuckpt(t, c, "report"))
	keep(t, "operations.otlp.json", gpuckpt(t, c, "report", "--otlp"))
	picture := filepath.Join(t.TempDir(), "job.svg")
	gpuckpt(t, c, "report", "job", "--svg", picture)
	svg, err := os.ReadFile(picture)
	if err != nil || strings.Count(string(svg), "checkpoint of job at") != 2 || strings.Count(string(svg), "suspend of job at") != 2 || strings.Count(string(svg), "restore of job at") != 1 {
		t.Errorf("%v, %s", err, svg)
	}
	keep(t, "timeline.svg", string(svg))
}

// keep writes what gpuckpt prints to the directory for results, if there is one.
func keep(t *testing.T, name, text string) {
	t.Helper()
	if dir := os.Getenv("OUT"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
}
