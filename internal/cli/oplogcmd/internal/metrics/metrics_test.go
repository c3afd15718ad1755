// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"net/http/httptest"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

func TestCollector(t *testing.T) {
	state := t.TempDir()
	for name, files := range map[string]map[string]string{
		"away": {"gpuckpt-timeline.json": `{"operation":"suspend"}`, "config.json": `{"linux":{"devices":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0}]}}`},
		"back": {"gpuckpt-timeline.json": `{"operation":"resume"}`},
		"full": {"gpuckpt-timeline.json": `{"operation":"resume","failed":"give access"}`},
		"kept": {"gpuckpt-timeline.json": `{"operation":"suspend","failed":"lock"}`},
	} {
		dir := filepath.Join(state, "io.containerd.runtime.v2.task", "default", name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for file, text := range files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	c := New(state)
	dump := images.Phase{Name: "dump", Took: 2 * time.Second, Bytes: 1 << 20}
	c.Add([]oplog.Entry{
		{Operation: "checkpoint", Began: time.Unix(1000, 0), Took: 3 * time.Second, Phases: []images.Phase{dump}},
		{Operation: "checkpoint", Took: time.Second, Phases: []images.Phase{dump}, Failed: "dump", Error: "disk full"},
		{Operation: "restore", Took: time.Second, Error: "another driver"},
	})
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(c); err != nil {
		t.Fatal(err)
	}
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
	text := answer.Body.String()
	// promtool's linter.
	if problems, err := promlint.New(strings.NewReader(text)).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	for _, line := range []string{
		`gpuckpt_operations_total{operation="checkpoint",outcome="success"} 1`,
		`gpuckpt_operations_total{operation="checkpoint",outcome="failure"} 1`,
		`gpuckpt_failures_total{operation="checkpoint",step="dump"} 1`,
		`gpuckpt_bytes_total{operation="checkpoint",phase="dump"} 2.097152e+06`,
		`gpuckpt_operation_seconds_sum{operation="checkpoint"} 3`,
		`gpuckpt_phase_seconds_count{operation="checkpoint",phase="dump"} 2`,
		`gpuckpt_last_success_timestamp_seconds{operation="checkpoint"} 1003`,
		`gpuckpt_operations_total{operation="restore",outcome="failure"} 0`,
		`gpuckpt_operations_total{operation="restore",outcome="success"} 0`,
		`gpuckpt_operations_total{operation="restore",outcome="afresh"} 1`,
		`gpuckpt_operation_seconds_count{operation="restore"} 0`,
		`gpuckpt_operation_seconds_count{operation="resume"} 0`,
		`gpuckpt_build_info{version="` + version.Short() + `"} 1`,
		`gpuckpt_suspended_containers 2`,
		`gpuckpt_suspended_gpus 1`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("no %s in\n%s", line, text)
		}
	}
}
