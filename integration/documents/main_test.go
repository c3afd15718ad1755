// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package documents runs the commands of the documents as they are there: those that no other test runs
// (docs/commands).
package documents

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	shared *harness.Containerd
	bins   harness.Bins
	gpu    harness.GPU
)

const cdiDir = "/etc/cdi"

// apart are directories that the documents' commands write to: in the tests each is an empty one of
// their own.
var apart = []string{
	cdiDir, "/etc/cni", "/etc/gpuckpt", "/var/lib/gpuckpt", "/var/lib/node_exporter", "/var/lib/checkpoints", "/run/nerdctl", "/var/lib/nerdctl",
}

func TestMain(m *testing.M) {
	if err := harness.InOwnNetwork(apart...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	harness.MainShared(m.Run, func(s *harness.Session, c *harness.Containerd) {
		shared, bins, gpu = c, s.Bins, s.GPU
	}, func(c *harness.Containerd) []string {
		left, _ := filepath.Glob(filepath.Join(c.Dumps(), "*")) // the pattern is sound
		return left
	})
}
