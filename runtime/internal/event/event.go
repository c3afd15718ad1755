// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package event publishes what came of operations as containerd events.
//
// runc's shim publishes that a task was created, started, paused, resumed and deleted. Nobody
// publishes /tasks/checkpointed, although containerd has the event, and containerd has none for a
// restore, a suspension or a failure. Those have topics of gpuckpt's, and as payload an event of
// containerd's that every client can decode, `ctr events` too (docs/decisions/0030-events.md).
package event

import (
	"context"
	"strconv"
	"strings"
	"time"

	apievents "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/core/runtime"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/criu/different"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

// Prefix is that of the topics that are gpuckpt's own. Behind it is the operation in the past tense,
// or the operation and Failed.
const (
	Prefix = "/gpuckpt/"
	Failed = "-failed"
	// Afresh is behind the prefix when a container starts from the beginning that would rather have been restored.
	Afresh = "started-afresh"
)

// The labels of an event. Error is that of the operation, in an event of a failure; Bytes are those
// of all files of a checkpoint.
const (
	Operation = "operation"
	Took      = "took"
	Bytes     = "bytes"
	Error     = "error"
	// Different is what comes back different, or has, with different.Separator.
	Different = different.Label
)

// backlog is how many events wait at most. More wait only while containerd does not take any.
const backlog = 64

// done is an operation in the past tense.
var done = map[string]string{"checkpoint": "checkpointed", "restore": "restored", "suspend": "suspended", "resume": "resumed"}

// Announcer publishes events in the order in which it gets them. It never holds up who announces:
// an operation on a container does not wait for containerd.
type Announcer struct {
	queue chan event
	now   func() time.Time
}

type event struct {
	topic   string
	payload any
	flushed chan struct{} // instead of both: closed when what was queued before is published
}

// New returns an announcer that publishes until ctx ends. ctx has containerd's namespace.
func New(ctx context.Context, publisher events.Publisher) *Announcer {
	a := &Announcer{queue: make(chan event, backlog), now: time.Now}
	go func() {
		for {
			select {
			case e := <-a.queue:
				if e.flushed != nil {
					close(e.flushed)
					continue
				}
				// An event that cannot be sent is tried again by the publisher itself.
				if err := publisher.Publish(ctx, e.topic, e.payload); err != nil {
					log.G(ctx).WithError(err).WithField("topic", e.topic).Warn("publish an event")
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return a
}

// Over says that an operation ("checkpoint", "restore", "suspend", "resume") on a container is over.
// bytes are those that it wrote, 0 if that is not known; differs what is not as it was.
func (a *Announcer) Over(ctx context.Context, operation, id string, began time.Time, bytes uint64, differs []string, err error) {
	topic := Prefix + done[operation]
	labels := map[string]string{Operation: operation, Took: a.now().Sub(began).Round(time.Millisecond).String()}
	switch {
	case err != nil:
		topic = Prefix + operation + Failed
		labels[Error] = visible.Text(err.Error())
	case bytes > 0:
		labels[Bytes] = strconv.FormatUint(bytes, 10)
	}
	if err == nil && len(differs) > 0 {
		labels[Different] = visible.Text(strings.Join(differs, different.Separator))
	}
	a.send(ctx, event{topic: topic, payload: &apievents.ContainerUpdate{ID: id, Labels: labels}})
}

// Afresh says that a container starts from the beginning, and why it is not restored.
func (a *Announcer) Afresh(ctx context.Context, id string, began time.Time, why error) {
	labels := map[string]string{Operation: "restore", Took: a.now().Sub(began).Round(time.Millisecond).String(), Error: visible.Text(why.Error())}
	a.send(ctx, event{topic: Prefix + Afresh, payload: &apievents.ContainerUpdate{ID: id, Labels: labels}})
}

// Checkpointed is containerd's own event of a checkpoint in a directory.
func (a *Announcer) Checkpointed(ctx context.Context, id, dir string) {
	a.send(ctx, event{topic: runtime.TaskCheckpointedEventTopic, payload: &apievents.TaskCheckpointed{ContainerID: id, Checkpoint: dir}})
}

// Flush waits until what was announced is published, at most for within. Who ends with its last
// container calls it: a shim whose Create fails is ended at once.
func (a *Announcer) Flush(within time.Duration) {
	late := time.After(within)
	e := event{flushed: make(chan struct{})}
	select {
	case a.queue <- e:
	case <-late:
		return
	}
	select {
	case <-e.flushed:
	case <-late:
	}
}

func (a *Announcer) send(ctx context.Context, e event) {
	select {
	case a.queue <- e:
	default:
		log.G(ctx).WithField("topic", e.topic).Warn("an event is lost: containerd takes none")
	}
}
