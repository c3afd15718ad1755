// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// One command makes a checkpoint and sends it to a registry with a password. Where that fails, the
// image stays in containerd, and the error says how to go on. What cannot be sent is refused before. Layers are sent
// while others are made.
func TestCheckpointPush(t *testing.T) {
	results.Add(t)
	s := serve(t, true)
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--chunks", "3", "--seed", "7")
	k.Expect(t, "count", "101")
	ref, env := s.ref("job:1"), dockerConfig(t, s.host, "test", testPassword)

	fails(t, c, env, []string{"[image push]"}, "checkpoint", k.ID)
	k.Expect(t, "count", "102") // it runs as before

	// Without the password: the image is there all the same.
	fails(t, c, nil, []string{"docker login", "gpuckpt image push --namespace " + c.Namespace() + " gpuckpt.test/job:1 " + ref}, "checkpoint", k.ID, "--image", "gpuckpt.test/job:1", "--push", ref, "--leave-running")
	if _, err := c.Client().ImageService().Get(t.Context(), "gpuckpt.test/job:1"); err != nil {
		t.Errorf("the image did not stay: %v", err)
	}
	k.Expect(t, "count", "103")

	var early atomic.Bool // a blob was on its way before the image had its name
	sending := func() {
		if _, err := c.Client().ImageService().Get(context.WithoutCancel(t.Context()), ref); errdefs.IsNotFound(err) {
			early.Store(true)
		}
	}
	s.sending.Store(&sending)
	out, errs, err := try(t, c, env, "checkpoint", k.ID, "--push", ref, "--json")
	if err != nil {
		t.Fatalf("%v\n%s%s\n%s", err, out, errs, c.LogTail(3000))
	}
	made := decoded[struct {
		harness.CheckpointAnswer
		Push harness.TransferAnswer
	}](t, out)
	if !early.Load() {
		t.Error("nothing was sent before the image was complete")
	}
	if made.Push.Digest != made.Digest || made.Push.MovedBytes == 0 || s.sent.Load() < int64(made.Push.MovedBytes) {
		t.Errorf("gpuckpt checkpoint answers %+v after the registry got %d bytes", made, s.sent.Load())
	}
	k.MustRemove(t)
	forget(t, c)
	if _, errs, err := try(t, c, env, "image", "pull", ref, "--snapshotter", c.Snapshotter()); err != nil {
		t.Fatalf("%v\n%s", err, errs)
	}
	r := resume(t, c, ref, k.Port)
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "104")
	r.MustRemove(t)
}

// Those of several containers are sent while they are made, too. If they cannot be sent, the answer has
// the images all the same, and why.
func TestCutPush(t *testing.T) {
	results.Add(t)
	s := serve(t, true)
	c := session.Own(t, harness.Options{})
	var both []*harness.Container
	for _, id := range []string{"one", "two"} {
		k := c.Work(t, harness.RunSpec{ID: id, GPUs: []int{0}}, "counter")
		k.Expect(t, "next", "101")
		both = append(both, k)
	}
	type answer struct {
		Containers []struct {
			Image, Digest, PushError string
			Push                     *struct{ Image, Digest string }
		}
	}
	args := func(image string) []string {
		return []string{"checkpoint", "one", "two", "--image", image, "--push", s.ref("cut:1"), "--leave-running", "--json"}
	}
	out, errs, err := try(t, c, nil, args("gpuckpt.test/cut:1")...) // without the password
	made := decoded[answer](t, out).Containers
	if err == nil || !strings.Contains(errs, "docker login") || len(made) != 2 {
		t.Fatalf("%v\n%s%s", err, out, errs)
	}
	for _, m := range made {
		if m.Push != nil || !strings.Contains(m.PushError, "docker login") || !strings.HasPrefix(m.PushError, "push "+s.ref("cut:1")+"-") {
			t.Errorf("%+v", m)
		}
		if _, err := c.Client().ImageService().Get(t.Context(), m.Image); err != nil {
			t.Errorf("the image did not stay: %v", err)
		}
	}
	var early atomic.Bool // a blob was on its way before the images had their names
	sending := func() {
		if _, err := c.Client().ImageService().Get(context.WithoutCancel(t.Context()), "gpuckpt.test/cut:2-one"); errdefs.IsNotFound(err) {
			early.Store(true)
		}
	}
	s.sending.Store(&sending)
	out, errs, err = try(t, c, dockerConfig(t, s.host, "test", testPassword), args("gpuckpt.test/cut:2")...)
	if err != nil {
		t.Fatalf("%v\n%s%s", err, out, errs)
	}
	for i, m := range decoded[answer](t, out).Containers {
		if m.Push == nil || m.Push.Digest != m.Digest || m.Push.Image != s.ref("cut:1")+"-"+both[i].ID || m.PushError != "" {
			t.Errorf("%+v", m)
		}
	}
	if !early.Load() {
		t.Error("nothing was sent before the images were complete")
	}
	// Who gives up while they are sent has them too, and is told no more than that.
	held := make(chan struct{})
	hold := func() { <-held }
	s.sending.Store(&hold)
	cmd := command(t.Context(), t, c, dockerConfig(t, s.host, "test", testPassword), args("gpuckpt.test/cut:3")...)
	var answered, said strings.Builder
	cmd.Stdout, cmd.Stderr = &answered, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	harness.Within(t, "the images are complete, and let go", func() bool {
		_, err := c.Client().ImageService().Get(t.Context(), "gpuckpt.test/cut:3-two")
		kept, lerr := c.Client().LeasesService().List(t.Context())
		return err == nil && lerr == nil && len(kept) == 0
	})
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	err = cmd.Wait()
	close(held)
	if err == nil || answered.Len() == 0 {
		t.Fatalf("%v\n%s%s", err, answered.String(), said.String())
	}
	if made = decoded[answer](t, answered.String()).Containers; len(made) != 2 {
		t.Fatalf("it answers %s", answered.String())
	}
	for _, m := range made {
		if !strings.HasSuffix(m.PushError, "interrupted") {
			t.Errorf("%+v", m)
		}
	}
	for _, k := range both {
		k.Expect(t, "next", "102")
	}
}
