// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package checkpoint tests the main job end to end: an unmodified ctr
// checkpoints and restores GPU containers through the shim, in a private
// containerd, on a real GPU where there is one and on the software GPU
// elsewhere (GPUCKPT_GPU chooses).
package checkpoint

import (
	"path/filepath"
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
	harness.MainShared(m.Run, func(s *harness.Session, c *harness.Containerd) {
		session, shared, bins, gpu, results = s, c, s.Bins, s.GPU, s.Results
	}, unpacked)
}

// unpacked are the directories that containerd made for the images of single
// checkpoints and restores, and that are still there.
func unpacked(c *harness.Containerd) []string {
	left, _ := filepath.Glob(filepath.Join(c.Dir(), "tmp", "ctrd-checkpoint*")) // the pattern is sound
	return left
}

// restore restores a checkpoint image, removed when the test ends.
func restore(t *testing.T, c *harness.Containerd, id, ref string, port int) *harness.Container {
	t.Helper()
	k, err := c.Restore(t.Context(), id, ref, port)
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	k.RemoveAtEnd(t)
	return k
}
