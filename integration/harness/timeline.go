// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
)

// Bundle is the directory of the shim of the container of that id.
func (c *Containerd) Bundle(id string) string {
	return filepath.Join(c.home.state(), "io.containerd.runtime.v2.task", c.Namespace(), id)
}

// Timeline reads the phases of the last checkpoint or restore of the container
// of that id, which the shim leaves in the bundle and which go with it. The error
// is fs.ErrNotExist when there was none.
func (c *Containerd) Timeline(id string) (oplog.Entry, error) {
	var line oplog.Entry
	path := filepath.Join(c.Bundle(id), sequence.TimelineName)
	data, err := os.ReadFile(path)
	if err != nil {
		return line, fmt.Errorf("read the timeline: %w", err)
	}
	if err := json.Unmarshal(data, &line); err != nil {
		return line, fmt.Errorf("read the timeline %s: %w", path, err)
	}
	return line, nil
}

// Phases notes the phases of a container's last operation, as "checkpoint/dump"
// in seconds and "checkpoint/dump_bytes"; the test fails without any.
func (t *TestResult) Phases(test T, k *Container) {
	test.Helper()
	line, err := k.c.Timeline(k.ID)
	if err != nil {
		test.Fatal(err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range line.Phases {
		name := line.Operation + "/" + p.Name
		t.Times[name] = p.Took.Seconds()
		if p.Bytes > 0 {
			t.Numbers[strings.ReplaceAll(name, " ", "_")+"_bytes"] = float64(p.Bytes)
		}
	}
	t.Times[line.Operation+"/whole"] = line.Took.Seconds()
}
