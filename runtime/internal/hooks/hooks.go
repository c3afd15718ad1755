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

// The annotations beside those of the hooks, without their prefix, and the values of onFailure.
const (
	timeout   = "timeout" // of each hook
	onFailure = "after-restore.on-failure"
	refuse    = "refuse"
	logged    = "log"
)

// signalPrefix begins a hook that is a signal.
const signalPrefix = "signal:"

// Read reads the hooks of a container, of which none may take more time than longest, the node's. An
// annotation that is none of them is an error.
func Read(container map[string]string, longest time.Duration) (Hooks, error) {
	var all Hooks
	within := min(defaultTimeout, longest)
	known := map[string]**Hook{"before-checkpoint": &all.BeforeCheckpoint, "after-checkpoint": &all.AfterCheckpoint, "after-restore": &all.AfterRestore}
	for _, key := range slices.Sorted(maps.Keys(container)) { // a hook comes before its onFailure
		name, ours := strings.CutPrefix(key, annotations.HookPrefix)
		if !ours {
			continue
		}
		var err error
		switch at, ok := known[name]; {
		case ok:
			*at = &Hook{Name: name, Refuse: name == "before-checkpoint"}
			err = (*at).parse(container[key])
		case name == timeout:
			within, err = readTimeout(container[key], longest)
		case name == onFailure && all.AfterRestore != nil:
			all.AfterRestore.Refuse, err = readOnFailure(container[key])
		case name == onFailure:
			err = fmt.Errorf("there is no annotation %safter-restore", annotations.HookPrefix)
		default:
			err = fmt.Errorf("there are only the hooks %s, and beside them %s and %s", strings.Join(slices.Sorted(maps.Keys(known)), ", "), timeout, onFailure)
		}
		if err != nil {
			return Hooks{}, fmt.Errorf("annotation %s is %q; %w: %w", key, container[key], err, errdefs.ErrInvalidArgument)
		}
	}
	for _, at := range known {
		if *at != nil {
			(*at).Timeout = within
		}
	}
	return all, nil
}

func readTimeout(value string, longest time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 || d > longest {
		return 0, fmt.Errorf(`it must be a time, such as "10s", and at most the %v of the node's hook_timeout`, longest)
	}
	return d, nil
}

func readOnFailure(value string) (refuses bool, err error) {
	if value != refuse && value != logged {
		return false, fmt.Errorf("it must be %q or %q", refuse, logged)
	}
	return value == refuse, nil
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
	case status == 128+int(unix.SIGKILL):
		err = fmt.Errorf("it was killed: the container's own program has ended, or its memory limit was met; its log may say more: %w", errdefs.ErrFailedPrecondition)
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
