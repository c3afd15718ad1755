// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package clientpause

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
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

// While a checkpoint is made of a container that its client has paused, others are refused at once: also one
// that waits for the container already. One of a container that runs is waited for.
func TestLock(t *testing.T) {
	var e Checkpoints
	var container sync.Mutex
	others := make(chan error)
	wait := func() {
		err := e.Lock(&container)
		if err == nil {
			container.Unlock()
		}
		others <- err
	}
	container.Lock()
	e.Begin(false)
	go wait()
	select {
	case err := <-others:
		t.Errorf("beside a checkpoint of a container that runs: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	e.End(nil)
	container.Unlock()
	if err := <-others; err != nil {
		t.Errorf("after a checkpoint of a container that runs: %v", err)
	}
	container.Lock()
	go wait()
	select {
	case err := <-others:
		t.Errorf("before any checkpoint: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	e.Begin(true)
	if err := <-others; !errors.Is(err, ErrOther) {
		t.Errorf("while another checkpoint begins: %v", err)
	}
	go wait()
	if err := <-others; !errors.Is(err, ErrOther) {
		t.Errorf("beside another checkpoint: %v", err)
	}
	e.End(nil)
	container.Unlock()
	if err := e.Lock(&container); err != nil {
		t.Errorf("after the other checkpoint: %v", err)
	}
}

// A suspension is refused beside a checkpoint that a client has paused the container for, and after it until
// the client has resumed the container. After one that was refused it is not.
func TestLockToSuspend(t *testing.T) {
	var e Checkpoints
	var container sync.Mutex
	try := func(when string, refused bool) {
		t.Helper()
		err := e.LockToSuspend(&container)
		if err == nil {
			container.Unlock()
		}
		if errors.Is(err, ErrPaused) != refused {
			t.Errorf("%s: %v", when, err)
		}
	}
	e.Begin(true)
	try("beside a checkpoint", true)
	e.End(errors.New("on order"))
	try("after one that failed", false)
	e.Begin(true)
	e.End(nil)
	try("before the client resumes", true)
	e.Begin(true)
	e.End(errors.New("on order"))
	try("before it resumes, after a second one", true)
	e.Keep(t.Context())
	try("before the resume has succeeded", true)
	e.GoesOn()
	try("after it has resumed", false)
	e.Begin(false)
	e.End(nil)
	try("after a checkpoint of a container that runs", false)
}

// What a checkpoint has claimed that failed may be claimed again.
func TestClaimAgain(t *testing.T) {
	own := filepath.Join(t.TempDir(), "ctrd-checkpoint")
	var e Checkpoints
	e.Begin(true)
	if err := e.Claim(own); err != nil {
		t.Error(err)
	}
	e.End(errors.New("on order"))
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
