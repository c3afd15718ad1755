// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oplogcmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// "gpuckpt report --otlp" has a span for each operation and one for each of its steps, the same ones
// each time.
func TestOTLP(t *testing.T) {
	dir := t.TempDir()
	began := time.Unix(1700000000, 5)
	for _, e := range []oplog.Entry{
		{Operation: "checkpoint", Namespace: "default", Container: "job", Began: began, Took: 3 * time.Second,
			Phases: []images.Phase{{Name: "pause", Took: time.Second}, {Name: "dump", Start: time.Second, Took: 2 * time.Second, Bytes: 7}}},
		{Operation: "restore", Namespace: "default", Container: "job", Began: began.Add(time.Hour), Took: time.Second, Failed: "restore", Error: "broken"},
		{Operation: "restore", Namespace: "default", Container: "job", Began: began.Add(2 * time.Hour), Took: time.Second, Error: "another driver"},
	} {
		if err := oplog.Append(dir, e); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(file, fmt.Appendf(nil, "log_dir = %q\n", dir), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(config.Env, file)
	ask := func() string {
		t.Helper()
		var out bytes.Buffer
		c := Report()
		c.SetOut(&out)
		c.SetArgs([]string{"--otlp"})
		if err := c.Execute(); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	said := ask()
	if ask() != said || strings.Count(said, "\n") != 1 {
		t.Errorf("it is not one line, or another one each time:\n%s", said)
	}
	var traces otlpTraces
	if err := json.Unmarshal([]byte(said), &traces); err != nil {
		t.Fatal(err)
	}
	spans := traces.ResourceSpans[0].ScopeSpans[0].Spans
	if len(spans) != 5 {
		t.Fatalf("there are %d spans", len(spans))
	}
	whole, pause, dump, restore, afresh := spans[0], spans[1], spans[2], spans[3], spans[4]
	if whole.Name != "checkpoint" || whole.Start != "1700000000000000005" || whole.End != "1700000003000000005" || whole.Parent != "" || len(whole.Trace) != 32 || len(whole.ID) != 16 {
		t.Errorf("the checkpoint is %+v", whole)
	}
	if dump.Name != "dump" || dump.Trace != whole.Trace || dump.Parent != whole.ID || dump.ID == pause.ID || dump.Start != pause.End || dump.Attributes[0].Value.Int != "7" {
		t.Errorf("its steps are %+v and %+v", pause, dump)
	}
	if restore.Trace == whole.Trace || restore.Status == nil || restore.Status.Code != otlpError || restore.Status.Message != "broken" {
		t.Errorf("the restore is %+v", restore)
	}
	if why := afresh.Attributes[len(afresh.Attributes)-1]; afresh.Name != "start afresh" || afresh.Status != nil || why != text("gpuckpt.not_restored", "another driver") {
		t.Errorf("the start from the beginning is %+v", afresh)
	}
}
