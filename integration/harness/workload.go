// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"fmt"
	"strconv"
	"time"
)

// Gpuwork completes what is to be run with a workload of gpuwork, unless it has
// a command line: the test's name for the container where it has none, and a port
// to ask the program on.
func Gpuwork(t T, spec RunSpec, args ...string) RunSpec {
	t.Helper()
	if spec.ID == "" {
		spec.ID = Name(t)
	}
	if spec.Port == 0 {
		port, err := FreePorts(max(1, spec.Ports))
		if err != nil {
			t.Fatal(err)
		}
		spec.Port = port
	}
	if spec.Args == nil {
		spec.Args = append(append([]string{"gpuwork"}, args...), "--port", strconv.Itoa(spec.Port))
	}
	return spec
}

// TryWork runs a workload of gpuwork, as Gpuwork completes it. The container is
// removed when the test ends. On error there is none.
func (c *Containerd) TryWork(t T, spec RunSpec, args ...string) (*Container, error) {
	t.Helper()
	k, err := c.Run(t.Context(), Gpuwork(t, spec, args...))
	if err != nil {
		return nil, err
	}
	k.RemoveAtEnd(t)
	return k, nil
}

// Work is TryWork that fails the test on an error.
func (c *Containerd) Work(t T, spec RunSpec, args ...string) *Container {
	t.Helper()
	k, err := c.TryWork(t, spec, args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	return k
}

// MustRemove removes the container at once, so that a restore can take its name.
func (k *Container) MustRemove(t T) {
	t.Helper()
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// RemoveAtEnd removes the container when the test ends.
func (k *Container) RemoveAtEnd(t T) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := k.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
}

// MustPid is Pid that fails the test on an error.
func (k *Container) MustPid(t T) int {
	t.Helper()
	pid, err := k.Pid(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// Process is the nth program of a container of which each listens on a port of
// its own, one after the other; for the questions and the output alone.
func (k *Container) Process(n int) *Container {
	return &Container{ID: fmt.Sprintf("%s, process %d", k.ID, n), Port: k.Port + n, c: k.c, of: k}
}

// Answer is what the program answers to a question; none fails the test.
func (k *Container) Answer(t T, question string) string {
	t.Helper()
	answer, err := k.Ask(t.Context(), question)
	if err != nil {
		t.Fatalf("%v\nits output: %s", err, k.Logs())
	}
	return answer
}

// Expect asks the program and fails the test unless it answers that.
func (k *Container) Expect(t T, question, want string) {
	t.Helper()
	if got := k.Answer(t, question); got != want {
		t.Fatalf("%s: %q: got %q, want %q", k.ID, question, got, want)
	}
}
