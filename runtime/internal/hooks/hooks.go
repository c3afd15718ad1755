// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hooks tells a program of its checkpoints and restores.
//
// The life of a hook: the container's annotations name it, and Read reads them once for an
// operation. BeforeCheckpoint runs before the container is locked. Of the two that follow, one
// runs: AfterCheckpoint where the program runs on, whatever became of the checkpoint, and
// AfterRestore in a container that is restored from it. Beside that a file in the container says
// how often the program was restored (WriteNote).
package hooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// Hooks are those of one container; nil for one that it does not have.
type Hooks struct{ BeforeCheckpoint, AfterCheckpoint, AfterRestore *Hook }

// Hook is a command that is run in the container, or a signal for its first process.
type Hook struct {
	Name    string      // "before-checkpoint", …
	Command []string    // nil for a signal
	Signal  unix.Signal // 0 for a command
	Timeout time.Duration
	// Refuse says that the operation fails with the hook. Else the error is logged.
	Refuse bool
}

// Program is the program that is told.
type Program interface {
	// Run runs a command in the container as the program's user, waits for its end, and returns
	// its exit status and the end of its output. When the context ends, the command is killed.
	Run(ctx context.Context, command []string) (status int, output string, err error)
	// Signal sends a signal to the first process of the container.
	Signal(ctx context.Context, signal unix.Signal) error
}

// defaultTimeout is that of a hook without an annotation for it.
const defaultTimeout = 30 * time.Second

// longest bounds the time that a container's annotation gives a hook: other containers may wait for
// this one's turn, and their clients for them.
const longest = 10 * time.Minute

// What is added to the name of a hook's annotation, and the values of onFailure.
const (
	timeout   = ".timeout"
	onFailure = ".on-failure"
	refuse    = "refuse"
	logged    = "log"
)

// signalPrefix begins a hook that is a signal.
const signalPrefix = "signal:"

// Read reads the hooks of a container. An annotation that is none of them is an error.
func Read(container map[string]string) (Hooks, error) {
	var all Hooks
	known := map[string]**Hook{"before-checkpoint": &all.BeforeCheckpoint, "after-checkpoint": &all.AfterCheckpoint, "after-restore": &all.AfterRestore}
	for _, key := range slices.Sorted(maps.Keys(container)) {
		name, ours := strings.CutPrefix(key, annotations.HookPrefix)
		if !ours {
			continue
		}
		event := strings.TrimSuffix(strings.TrimSuffix(name, timeout), onFailure)
		at, ok := known[event]
		if !ok {
			return Hooks{}, fmt.Errorf("annotation %s: there are only the hooks %s: %w", key, strings.Join(slices.Sorted(maps.Keys(known)), ", "), errdefs.ErrInvalidArgument)
		}
		if *at == nil && event == name {
			*at = &Hook{Name: name, Timeout: defaultTimeout, Refuse: name == "before-checkpoint"}
		}
		if *at == nil { // the name itself sorts first
			return Hooks{}, fmt.Errorf("annotation %s: there is no annotation %s%s: %w", key, annotations.HookPrefix, event, errdefs.ErrInvalidArgument)
		}
		if err := (*at).set(strings.TrimPrefix(name, event), container[key]); err != nil {
			return Hooks{}, fmt.Errorf("annotation %s is %q; %w: %w", key, container[key], err, errdefs.ErrInvalidArgument)
		}
	}
	return all, nil
}

// set sets what one annotation says.
func (h *Hook) set(what, value string) (err error) {
	switch what {
	case timeout:
		if h.Timeout, err = time.ParseDuration(value); err != nil || h.Timeout <= 0 || h.Timeout > longest {
			return fmt.Errorf(`it must be a time, such as "10s", and %v at most`, longest)
		}
	case onFailure:
		if value != refuse && value != logged {
			return fmt.Errorf("it must be %q or %q", refuse, logged)
		}
		if h.Refuse = value == refuse; h.Refuse && h.Name == "after-checkpoint" {
			return fmt.Errorf("it can only be %q: the checkpoint is over", logged)
		}
	default:
		return h.parse(value)
	}
	return nil
}

// parse parses a signal, a JSON array, or words.
func (h *Hook) parse(value string) error {
	const form = `it must be a command, as a JSON array or as words with spaces between, or "signal:" and a signal's name`
	if name, ok := strings.CutPrefix(value, signalPrefix); ok {
		if h.Signal = unix.SignalNum(name); h.Signal == 0 {
			return fmt.Errorf("no signal is called %q", name)
		}
		return nil
	}
	if strings.HasPrefix(strings.TrimSpace(value), "[") {
		if err := json.Unmarshal([]byte(value), &h.Command); err != nil {
			return errors.New(form)
		}
	} else {
		h.Command = strings.Fields(value)
	}
	if len(h.Command) == 0 || h.Command[0] == "" {
		return errors.New(form)
	}
	return nil
}

// Tell runs a hook. It returns the error of a hook that refuses, and logs that of any other. It
// returns nil for a hook that is nil.
func (h *Hook) Tell(ctx context.Context, p Program) error {
	if h == nil {
		return nil
	}
	err := h.run(ctx, p)
	if err != nil && !h.Refuse {
		log.G(ctx).WithError(err).WithField("hook", h.Name).Warn("hook failed")
		return nil
	}
	return err
}

func (h *Hook) run(ctx context.Context, p Program) error {
	late := fmt.Errorf("it has taken longer than %v: %w", h.Timeout, context.DeadlineExceeded)
	ctx, cancel := context.WithTimeoutCause(ctx, h.Timeout, late)
	defer cancel()
	if h.Signal != 0 {
		if err := p.Signal(ctx, h.Signal); err != nil {
			return fmt.Errorf("hook %s: send %s: %w", h.Name, unix.SignalName(h.Signal), err)
		}
		return nil
	}
	status, output, err := p.Run(ctx, h.Command)
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case err != nil:
		err = fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	case status != 0:
		err = fmt.Errorf("it ended with status %d: %w", status, errdefs.ErrFailedPrecondition)
	default:
		return nil
	}
	if output = strings.TrimSpace(output); output != "" {
		output = fmt.Sprintf(" (its output ends with %q)", output)
	}
	return fmt.Errorf("hook %s: run %q in the container%s: %w", h.Name, strings.Join(h.Command, " "), output, err)
}
