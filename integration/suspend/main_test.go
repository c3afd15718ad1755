// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package suspend tests "gpuckpt suspend" and "gpuckpt resume" end to end, and
// stock clients beside them, in a private containerd, on a real GPU where there
// is one and on the software GPU elsewhere (GPUCKPT_GPU chooses).
package suspend

import (
	"fmt"
	"os"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	session *harness.Session
	// shared serves every test that needs nothing special of its containerd.
	shared  *harness.Containerd
	bins    harness.Bins
	gpu     harness.GPU
	results *harness.Results
)

func TestMain(m *testing.M) {
	// Where TestUnseenGPU makes nodes.
	err := harness.InOwnNetwork()
	if err == nil {
		_, err = harness.Cover("/dev")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	harness.MainShared(m.Run, func(s *harness.Session, c *harness.Containerd) {
		session, shared, bins, gpu, results = s, c, s.Bins, s.GPU, s.Results
	}, nil)
}
