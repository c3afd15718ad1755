// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package event

import (
	"context"
	"errors"
	"maps"
	"testing"
	"time"

	apievents "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/core/events"
)

// publisher hands over what it is asked to publish, and takes nothing while nobody reads.
type publisher chan event

func (p publisher) Publish(ctx context.Context, topic string, payload events.Event) error {
	select {
	case p <- event{topic: topic, payload: payload}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func TestOver(t *testing.T) {
	p := make(publisher)
	a := New(t.Context(), p)
	began := time.Unix(100, 0)
	a.now = func() time.Time { return began.Add(1500 * time.Millisecond) }
	for _, c := range []struct {
		operation string
		bytes     uint64
		different []string
		err       error
		topic     string
		labels    map[string]string
	}{
		{operation: "checkpoint", bytes: 7, topic: "/gpuckpt/checkpointed", labels: map[string]string{Operation: "checkpoint", Took: "1.5s", Bytes: "7"}},
		{operation: "checkpoint", bytes: 7, err: errors.New("dump: full"), topic: "/gpuckpt/checkpoint-failed", labels: map[string]string{Operation: "checkpoint", Took: "1.5s", Error: "dump: full"}},
		{operation: "restore", topic: "/gpuckpt/restored", labels: map[string]string{Operation: "restore", Took: "1.5s"}},
		{operation: "restore", different: []string{"a: b", "c"}, topic: "/gpuckpt/restored", labels: map[string]string{Operation: "restore", Took: "1.5s", Different: "a: b; c"}},
		{operation: "suspend", topic: "/gpuckpt/suspended", labels: map[string]string{Operation: "suspend", Took: "1.5s"}},
		{operation: "resume", topic: "/gpuckpt/resumed", labels: map[string]string{Operation: "resume", Took: "1.5s"}},
	} {
		a.Over(t.Context(), c.operation, "job", began, c.bytes, c.different, c.err)
		e := <-p
		payload, ok := e.payload.(*apievents.ContainerUpdate)
		if !ok || e.topic != c.topic || payload.ID != "job" || !maps.Equal(payload.Labels, c.labels) {
			t.Errorf("%s: %s %+v, want %s %v", c.operation, e.topic, e.payload, c.topic, c.labels)
		}
	}
}

// Flush returns when all that was announced before is published, and not for ever.
func TestFlush(t *testing.T) {
	p := make(publisher, 3)
	a := New(t.Context(), p)
	for range 3 {
		a.Checkpointed(t.Context(), "job", "dir")
	}
	a.Flush(time.Hour)
	if len(p) != 3 {
		t.Errorf("%d events are published", len(p))
	}
	a.Checkpointed(t.Context(), "job", "dir") // for which there is no room
	a.Flush(time.Millisecond)
}

// A containerd that takes no events holds up nobody, and those that wait come in order.
func TestNobodyReads(t *testing.T) {
	p := make(publisher)
	a := New(t.Context(), p)
	for i := range 3 * backlog {
		a.Checkpointed(t.Context(), "job", string(rune('a'+i%26)))
	}
	for i := range backlog {
		if e := (<-p).payload.(*apievents.TaskCheckpointed); e.Checkpoint != string(rune('a'+i%26)) {
			t.Fatalf("event %d is of %s", i, e.Checkpoint)
		}
	}
}
