// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package exclusive

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
	var e Checkpoints
	for _, claim := range []struct {
		path    string
		refused bool
	}{{own, false}, {own + "/", true}, {theirs, false}, {theirs, false}, {"", false}, {own, true}} {
		if err := e.Claim(claim.path); errors.Is(err, ErrOther) != claim.refused || err != nil && !claim.refused {
			t.Errorf("claim %q: %v", claim.path, err)
		}
	}
	e.Keep(t.Context())
	if info, err := os.Stat(own); err != nil || !info.IsDir() {
		t.Errorf("the directory was taken away, and is not there again: %v", err)
	}
	if err := e.Claim(own); err != nil {
		t.Errorf("after the container has gone on: %v", err)
	}
	e.Keep(t.Context()) // it is there
}

// While a checkpoint is made of a container that its client has paused, others are refused at once. What
// a checkpoint has claimed that failed may be claimed again.
func TestRefuse(t *testing.T) {
	own := filepath.Join(t.TempDir(), "ctrd-checkpoint")
	var e Checkpoints
	e.Begin(false)
	if err := e.Refuse(); err != nil {
		t.Errorf("of a container that runs: %v", err)
	}
	e.End(nil)
	e.Begin(true)
	if err := e.Refuse(); !errors.Is(err, ErrOther) {
		t.Errorf("beside another checkpoint: %v", err)
	}
	if err := e.Claim(own); err != nil {
		t.Error(err)
	}
	e.End(errors.New("on order"))
	if err := e.Refuse(); err != nil {
		t.Errorf("after the other checkpoint: %v", err)
	}
	if err := e.Claim(own); err != nil {
		t.Errorf("what a failed checkpoint had claimed: %v", err)
	}
	e.End(nil)
	e.Begin(true)
	if err := e.Claim(own); !errors.Is(err, ErrOther) {
		t.Errorf("what a checkpoint has claimed: %v", err)
	}
	e.End(ErrOther)
	e.Begin(true)
	if err := e.Claim(own); !errors.Is(err, ErrOther) {
		t.Errorf("what a checkpoint has claimed, after another was refused: %v", err)
	}
}
