// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
)

// StartAndWait is the Run of a program that reaps no other children.
func StartAndWait(cmd *exec.Cmd) (func() (int, error), error) {
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() (int, error) {
		err := cmd.Wait()
		if cmd.ProcessState == nil {
			return 0, err
		}
		if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			return 128 + int(ws.Signal()), nil
		}
		return cmd.ProcessState.ExitCode(), nil
	}, nil
}

// describe puts into words what the wait of a Run returned.
func describe(code int, err error) string {
	switch {
	case errors.Is(err, syscall.ECHILD):
		return "exit status unknown: another part of this program reaped it"
	case err != nil:
		return err.Error()
	case code > 128:
		return "signal: " + syscall.Signal(code-128).String()
	}
	return fmt.Sprintf("exit status %d", code)
}

type tail struct {
	mu  sync.Mutex
	end []byte
}

const tailBytes = 2 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end = append(t.end, p...)
	if extra := len(t.end) - tailBytes; extra > 0 {
		t.end = append(t.end[:0], t.end[extra:]...)
	}
	return len(p), nil
}

// String returns the last four lines, joined by " | ".
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(string(t.end)), "\n")
	return strings.Join(lines[max(0, len(lines)-4):], " | ")
}
