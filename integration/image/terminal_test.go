// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/cio"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// unread is what is typed at the terminal of startTTY.
const unread = "unread\n"

// startTTY starts a counter with a terminal, which ctr cannot without one.
func startTTY(t *testing.T, spec harness.RunSpec) (*harness.Container, error) {
	t.Helper()
	spec.CtrFlags = []string{"--tty"}
	spec.GPUs = []int{0}
	spec.Args = []string{"gpuwork", "counter", "--port", strconv.Itoa(spec.Port)}
	k, err := shared.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	k.RemoveAtEnd(t)
	c, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	task, err := c.NewTask(ctx, cio.NewCreator(cio.WithStreams(bytes.NewBufferString(unread), io.Discard, nil), cio.WithTerminal))
	if err != nil {
		return k, err
	}
	return k, task.Start(ctx)
}

// A program that was dumped with a terminal gets another, and one without none.
func TestTerminal(t *testing.T) {
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	with, without := "example.com/terminal:with", "example.com/terminal:without"
	k, err := startTTY(t, harness.RunSpec{ID: harness.Name(t), Port: port})
	if err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "101")
	var told struct{ Different []string }
	tries := 0
	harness.Within(t, "what was typed is missed", func() bool {
		tries++
		if err := shared.Gpuckpt(t.Context(), &told, "checkpoint", k.ID, "--leave-running", "--image", "example.com/terminal:"+strconv.Itoa(tries)); err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(told.Different, func(d string) bool { return strings.HasPrefix(d, "unread input of the container's terminal") })
	})
	dir, rw := dump(t, shared, k)
	k.MustRemove(t)
	layout, _ := layoutOf(t, shared, dir, rw, harness.WorkloadImage, with)
	importLayout(t, shared, layout, with)
	_, err = tryStart(t, harness.RunSpec{ID: "none", Annotations: asked, Image: with, Port: port}, "counter")
	harness.Says(t, err, "dumped with a terminal")
	if k, err = startTTY(t, harness.RunSpec{ID: "again", Annotations: asked, Image: with, Port: port}); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "102")

	port = built(t, shared, without, harness.RunSpec{ID: "plain"}, "counter")
	_, err = startTTY(t, harness.RunSpec{ID: "tty", Annotations: asked, Image: without, Port: port})
	harness.Says(t, err, "dumped without a terminal")
}
