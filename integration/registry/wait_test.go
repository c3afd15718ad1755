// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A checkpoint waits for the program's file, where the program sees it, by whatever link. It does not wait for one
// that has ended, and a wait that is given up leaves the container alone.
func TestWaitFor(t *testing.T) {
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "1048576", "--seed", "7")
	const ref = "gpuckpt.test/ready:1"
	inside := func(path string) string { return fmt.Sprintf("/proc/%d/root%s", k.MustPid(t), path) }
	fails(t, c, nil, []string{"run/ready", "absolute path"}, "checkpoint", k.ID, "--image", ref, "--wait-for", "run/ready")

	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := c.Gpuckpt(ctx, nil, "checkpoint", k.ID, "--image", ref, "--wait-for", "/run/now/ready"); err == nil {
		t.Fatal("a checkpoint without the file succeeded")
	}
	unharmed(t, c, k, ref, c.Dumps())

	// A link that leads to the container's root leads out of nothing.
	if err := os.Symlink("/run/here", inside("/run/now")); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		var answer any
		done <- c.Gpuckpt(t.Context(), &answer, "checkpoint", k.ID, "--image", ref, "--wait-for", "/run/now/ready", "--leave-running")
	}()
	k.Expect(t, "verify", "bad=0")
	if _, err := c.Client().ImageService().Get(t.Context(), ref); err == nil {
		t.Fatal("there is an image before the file")
	}
	if err := os.Mkdir(inside("/run/here"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(inside("/run/here/ready"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "verify", "bad=0")

	go func() {
		done <- c.Gpuckpt(t.Context(), nil, "checkpoint", k.ID, "--image", ref+"2", "--wait-for", "/never")
	}()
	if _, err := c.Ctr(t.Context(), "tasks", "kill", "--signal", "SIGKILL", k.ID); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil { // it was waiting, or had not begun to
		t.Error("a checkpoint of a container that has ended succeeded")
	}
}
