// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"strings"
	"time"

	apievents "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/typeurl/v2"

	"github.com/gpuckpt/gpuckpt/internal/criu/different"
)

// eventLimit bounds the wait for an event of an operation that is over. Other runtimes have none.
const eventLimit = 2 * time.Second

// differences hears from the runtime what comes back different, or has.
type differences struct {
	come  <-chan *events.Envelope
	known map[string][]string // by containers
	end   context.CancelFunc
}

// hear begins, before an operation whose events have a topic. Close ends it.
func hear(ctx context.Context, c *client.Client, topic string) *differences {
	ctx, end := context.WithCancel(ctx)
	come, _ := c.Subscribe(ctx, `topic=="`+topic+`"`)
	return &differences{come: come, known: make(map[string][]string), end: end}
}

// close can be called on nil.
func (d *differences) close() {
	if d != nil {
		d.end()
	}
}

// of returns what a container has different, whose operation is over. It can be called on nil.
func (d *differences) of(id string) []string {
	if d == nil {
		return nil
	}
	for late := time.After(eventLimit); ; {
		if all, known := d.known[id]; known {
			return all
		}
		select {
		case e := <-d.come:
			if e == nil {
				return nil
			}
			payload, err := typeurl.UnmarshalAny(e.Event)
			if over, ok := payload.(*apievents.ContainerUpdate); err == nil && ok {
				d.known[over.ID] = slices.DeleteFunc(strings.Split(over.Labels[different.Label], different.Separator), func(s string) bool { return s == "" })
			}
		case <-late:
			return nil
		}
	}
}

// differentWords returns it for a person, a line each.
func differentWords(all []string) string {
	var words strings.Builder
	for _, d := range all {
		words.WriteString("comes back different: " + d + "\n")
	}
	return words.String()
}
