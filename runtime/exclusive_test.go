// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// A second checkpoint with the work directory of the first is refused until the
// container goes on, and the directory is there by then.
func TestClaim(t *testing.T) {
	own := filepath.Join(t.TempDir(), "ctrd-checkpoint") // as CRI names it
	theirs := filepath.Join(t.TempDir(), "work")         // a user's, by ctr's --work-path
	var e exclusive
	for _, claim := range []struct {
		path    string
		refused bool
	}{{own, false}, {own + "/", true}, {theirs, false}, {theirs, false}, {"", false}, {own, true}} {
		if err := e.claim(claim.path); errors.Is(err, errOtherCheckpoint) != claim.refused || err != nil && !claim.refused {
			t.Errorf("claim %q: %v", claim.path, err)
		}
	}
	e.keep(t.Context())
	if info, err := os.Stat(own); err != nil || !info.IsDir() {
		t.Errorf("the directory was taken away, and is not there again: %v", err)
	}
	if err := e.claim(own); err != nil {
		t.Errorf("after the container has gone on: %v", err)
	}
	e.keep(t.Context()) // it is there
}
