// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/opencontainers/go-digest"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The whole way: a container's checkpoint goes to a registry, everything of it
// is removed here, and what comes back resumes.
func TestCheckpointThroughARegistry(t *testing.T) {
	s := serve(t, false)
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--chunks", "3", "--seed", "7")
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "101")
	ref := s.ref("job:1")

	made := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", ref)
	if made.Running || made.GPUBytes < 50331648 {
		t.Errorf("gpuckpt checkpoint answers %+v", made)
	}
	if status, err := k.Status(t.Context()); err != nil || status != client.Stopped {
		t.Fatalf("after its checkpoint the container is %q, %v", status, err)
	}
	k.MustRemove(t)
	gpuckpt(t, c, "image", "verify", ref)
	pushed := asJSON[harness.TransferAnswer](t, c, "image", "push", ref)
	if pushed.Digest != made.Digest || pushed.MovedBytes != pushed.Bytes || s.sent.Load() < int64(pushed.Bytes) {
		t.Errorf("gpuckpt image push answers %+v after the registry got %d bytes", pushed, s.sent.Load())
	}

	forget(t, c)
	if has(t, c, made.Digest) {
		t.Fatal("the image is still here")
	}
	fails(t, c, nil, []string{"there is no image", "gpuckpt image pull"}, "restore", ref)
	gpuckpt(t, c, "image", "pull", ref, "--snapshotter", c.Snapshotter())
	r := resume(t, c, ref, k.Port)
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "102")
	r.MustRemove(t)

	// ... once more, with gpuckpt in place of ctr.
	spec := cdiSpec(t, c)
	fails(t, c, nil, []string{"if the checkpoint has GPUs, name as many with --gpus or --device"}, "restore", ref, "--net-host", "--snapshotter", c.Snapshotter())
	fails(t, c, nil, []string{"have no such device", "gpuckpt cdi generate"}, "restore", ref, "--net-host", "--gpus", "7", "--cdi-spec-dirs", spec, "--snapshotter", c.Snapshotter())
	args := []string{"restore", ref, "--name", "again", "--net-host", "--gpus", "0", "--cdi-spec-dirs", spec, "--snapshotter", c.Snapshotter()}
	if out := gpuckpt(t, c, args...); out != "again\n" {
		t.Errorf("gpuckpt restore printed %q", out)
	}
	again := adopt(t, c, "again", k.Port)
	again.Expect(t, "verify", "bad=0")
	again.Expect(t, "count", "102")
	again.MustRemove(t)
}

// A directory that a layer's archive lacks is as the layers below have it, as where containerd's own clients pull.
func TestLayerWithoutItsDirectory(t *testing.T) {
	s := serve(t, false)
	c := session.Own(t, harness.Options{})
	program, err := bins.Path("gpuwork")
	if err != nil {
		t.Fatal(err)
	}
	image, err := harness.BuildImage(t.Context(), harness.ImageSpec{Files: map[string]string{"/usr/bin/gpuwork": program}, Guests: gpu.LibraryFiles()})
	for _, entry := range []tar.Header{{Typeflag: tar.TypeDir, Name: "data/", Mode: 0o1777}, {Typeflag: tar.TypeReg, Name: "data/file", Mode: 0o644}} {
		var archive bytes.Buffer
		w := tar.NewWriter(&archive)
		if err := errors.Join(err, w.WriteHeader(&entry), w.Close()); err != nil {
			t.Fatal(err)
		}
		layer, lerr := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive.Bytes())), nil })
		if lerr != nil {
			t.Fatal(lerr)
		}
		image, err = mutate.AppendLayers(image, layer)
	}
	if err != nil {
		t.Fatal(err)
	}
	const name = "gpuckpt.test/two-layers:latest"
	if err := c.Import(t.Context(), name, image); err != nil {
		t.Fatal(err)
	}
	k := start(t, c, harness.RunSpec{Image: name}, "counter")
	ref := s.ref("job:1")
	gpuckpt(t, c, "checkpoint", k.ID, "--image", ref)
	k.MustRemove(t)
	gpuckpt(t, c, "image", "push", ref)
	forget(t, c)
	gpuckpt(t, c, "image", "pull", ref, "--snapshotter", c.Snapshotter())
	r := resume(t, c, ref, k.Port)
	pid, err := r.Pid(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if is, err := os.Stat(fmt.Sprintf("/proc/%d/root/data", pid)); err != nil || is.Mode() != fs.ModeDir|fs.ModeSticky|0o777 {
		t.Errorf("the directory is %v, %v", is.Mode(), err)
	}
	r.MustRemove(t)
}

// A container that is left running goes on before the image is made, and can be
// checkpointed again; of the second image only what has changed is stored and
// sent.
func TestUnchangedGPUStateIsNotSentAgain(t *testing.T) {
	layers := 24 // of 64 MiB: one is less than 5 %
	if gpu.Kind == harness.SoftwareGPU {
		layers = 10
	}
	bytes := layers * 64 << 20
	s := serve(t, false)
	c := session.Own(t, harness.Options{})
	result := results.Add(t)
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", strconv.Itoa(bytes), "--chunks", "1", "--seed", "7")
	first, second := s.ref("job:1"), s.ref("job:2")
	made := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", first, "--leave-running")
	if !made.Running {
		t.Errorf("gpuckpt checkpoint answers %+v", made)
	}
	gpuckpt(t, c, "image", "push", first)
	k.Expect(t, "write 10", "wrote 10")
	again := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", second, "--leave-running", "--previous", first)
	k.Expect(t, "verify", "bad=0")

	before := s.sent.Load()
	pushed := asJSON[harness.TransferAnswer](t, c, "image", "push", second)
	sent := s.sent.Load() - before
	share := float64(pushed.GPUReusedBytes) / float64(pushed.GPUBytes)
	result.Number("gpu_reused_share", share)
	result.Number("sent_bytes", float64(sent))
	result.Number("image_bytes", float64(pushed.Bytes))
	if want := 1 - 1.2/float64(layers); share < want || float64(sent) > 1.2*(1-want)*float64(pushed.Bytes) { // one layer was changed
		t.Errorf("%.1f %% of the GPU state's bytes were in the registry, and %d bytes of %d were sent; want %.0f %% and more", 100*share, sent, pushed.Bytes, 100*want)
	}
	if again.GPUReusedBytes < again.GPUWrittenBytes*uint64(layers*5/8) {
		t.Errorf("the second image's GPU layers: %d bytes written, %d were there", again.GPUWrittenBytes, again.GPUReusedBytes)
	}
}

// A tag that has moved in the registry does not move on the node: neither a pull nor one that decrypts
// takes the name from the image that is there. Nothing is left of either.
func TestPullKeepsNames(t *testing.T) {
	private, public := keyPair(t)
	s := serve(t, false)
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "counter")
	k.Expect(t, "next", "101")
	ref := s.ref("job:1")
	made := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", ref, "--leave-running")
	gpuckpt(t, c, "image", "push", ref)
	gpuckpt(t, c, "image", "pull", ref, "--snapshotter", c.Snapshotter()) // the same
	moved := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", "gpuckpt.test/job:2")
	gpuckpt(t, c, "image", "push", "gpuckpt.test/job:2", ref)
	names := func(want digest.Digest) {
		t.Helper()
		list, err := c.Client().ImageService().List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range list {
			if strings.HasPrefix(i.Name, "gpuckpt.invalid/") || i.Name == ref && i.Target.Digest != want {
				t.Errorf("%s is %s", i.Name, i.Target.Digest)
			}
		}
	}
	taken := []string{"belongs to another image, " + made.Digest, "images rm " + ref}
	fails(t, c, nil, taken, "image", "pull", ref)
	names(digest.Digest(made.Digest))
	gpuckpt(t, c, "image", "push", "--encrypt", public, "gpuckpt.test/job:2", ref)
	fails(t, c, nil, taken, "image", "pull", ref, "--decrypt-key", private)
	names(digest.Digest(made.Digest))
	if _, err := c.Ctr(t.Context(), "images", "rm", ref); err != nil {
		t.Fatal(err)
	}
	for range 2 { // and once more, which is the same
		gpuckpt(t, c, "image", "pull", ref, "--decrypt-key", private, "--snapshotter", c.Snapshotter())
		names(digest.Digest(moved.Digest))
	}
}

// What an interrupted push got across is not sent again, what an interrupted
// pull fetched is not fetched again.
func TestInterruptedTransfersGoOn(t *testing.T) {
	const bytes = 384 << 20
	s := serve(t, false)
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", strconv.Itoa(bytes), "--chunks", "1", "--seed", "7")
	ref := s.ref("job:1")
	made := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", ref)
	k.MustRemove(t)
	whole := int64(made.Bytes)

	// The connection breaks for good.
	s.breakAfter.Store(whole / 2)
	fails(t, c, nil, []string{"push " + ref}, "image", "push", ref, "--attempts", "1", "--parallel", "1")
	broken := s.sent.Load()
	s.breakAfter.Store(-1)
	second := asJSON[harness.TransferAnswer](t, c, "image", "push", ref)
	if int64(second.ReusedBytes) < whole/4 || s.sent.Load()-broken > whole*3/4 {
		t.Errorf("the first push sent %d bytes of %d, the second %d, %d were there", broken, whole, s.sent.Load()-broken, second.ReusedBytes)
	}

	// It breaks in the middle, and the command goes on by itself.
	forget(t, c)
	if has(t, c, made.Digest) {
		t.Fatal("the image is still here")
	}
	// ... a pull is broken off for good,
	s.breakAfter.Store(whole / 2)
	pull := []string{"image", "pull", ref, "--snapshotter", c.Snapshotter()}
	fails(t, c, nil, []string{"pull " + ref}, append(pull, "--attempts", "1", "--parallel", "1")...)
	if fetched := s.fetched.Load(); fetched < whole/3 {
		t.Fatalf("the pull was broken off after %d bytes of %d", fetched, whole)
	}
	s.breakAfter.Store(-1)
	before := s.fetched.Load()
	again := asJSON[harness.TransferAnswer](t, c, pull...)
	if got := s.fetched.Load() - before; got > whole*3/4 || int64(again.ReusedBytes) < whole/4 {
		t.Errorf("the second pull fetched %d bytes of %d, and says %d were there", got, whole, again.ReusedBytes)
	}
	gpuckpt(t, c, "image", "verify", ref)

	// A process that is killed leaves as much.
	forget(t, c)
	s.fetched.Store(0)
	cmd := command(t.Context(), t, c, nil, append(pull, "--parallel", "1")...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for s.fetched.Load() < whole/3 {
		time.Sleep(time.Millisecond)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // it was killed
	if has(t, c, made.Digest) && s.fetched.Load() >= whole {
		t.Log("the pull was faster than the kill")
	}
	before = s.fetched.Load()
	gpuckpt(t, c, pull...)
	if got := s.fetched.Load() - before; got > whole*9/10 {
		t.Errorf("after a pull that was killed, %d bytes of %d were fetched", got, whole)
	}
	gpuckpt(t, c, "image", "verify", ref)
}

// A connection that breaks once is mended by the command itself.
func TestABrokenConnectionIsTriedAgain(t *testing.T) {
	s := serve(t, false)
	k := start(t, shared, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "3")
	ref := s.ref("job:1")
	made := asJSON[harness.CheckpointAnswer](t, shared, "checkpoint", k.ID, "--image", ref)
	s.breakAfter.Store(int64(made.Bytes) / 2)
	mended := make(chan struct{})
	go func() {
		defer close(mended)
		for s.breakAfter.Load() > 0 {
			time.Sleep(time.Millisecond)
		}
		s.breakAfter.Store(-1)
	}()
	_, errs, err := try(t, shared, nil, "image", "push", ref)
	<-mended
	if err != nil || !strings.Contains(errs, "trying again") {
		t.Errorf("the push: %v\n%s", err, errs)
	}
}

// Whoever removes an image while it is pushed, as a kubelet does that frees its disk, does not take it away from the push.
func TestRemovedWhileItIsPushed(t *testing.T) {
	s := serve(t, false)
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--chunks", "3", "--seed", "5")
	ref := s.ref("job:1")
	made := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", ref)
	k.MustRemove(t)
	var once sync.Once
	sending := func() {
		once.Do(func() {
			if err := c.Client().ImageService().Delete(context.WithoutCancel(t.Context()), ref, images.SynchronousDelete()); err != nil {
				t.Error(err)
			}
		})
	}
	s.sending.Store(&sending)
	if sent := asJSON[harness.TransferAnswer](t, c, "image", "push", ref, "--parallel", "1"); sent.Digest != made.Digest {
		t.Errorf("sent is %s, want %s", sent.Digest, made.Digest)
	}
	if left, err := c.Client().LeasesService().List(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("it is kept still: %v, %v", left, err)
	}
}

// A registry that wants a password: without one, with a wrong one, with the
// right one out of Docker's configuration.
func TestCredentials(t *testing.T) {
	s := serve(t, true)
	k := start(t, shared, harness.RunSpec{}, "counter")
	k.Expect(t, "next", "101")
	ref := s.ref("job:1")
	gpuckpt(t, shared, "checkpoint", k.ID, "--image", ref, "--leave-running")

	clear := []string{"refused access", "docker login " + s.host}
	fails(t, shared, nil, clear, "image", "push", ref)
	fails(t, shared, dockerConfig(t, s.host, "test", "wrong"), clear, "image", "push", ref)
	env := dockerConfig(t, s.host, "test", testPassword)
	if _, errs, err := try(t, shared, env, "image", "push", ref); err != nil {
		t.Fatalf("%v\n%s", err, errs)
	}
	fails(t, shared, nil, clear, "image", "pull", ref)
	if _, errs, err := try(t, shared, env, "image", "pull", ref, "--snapshotter", shared.Snapshotter()); err != nil {
		t.Fatalf("%v\n%s", err, errs)
	}
	// A credential helper serves as well.
	dir := t.TempDir()
	helper := "#!/bin/sh\ncat >/dev/null\necho '{\"Username\":\"test\",\"Secret\":\"" + testPassword + "\"}'\n"
	if err := os.WriteFile(filepath.Join(dir, "docker-credential-fake"), []byte(helper), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"credHelpers":{"`+s.host+`":"fake"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, errs, err := try(t, shared, []string{"DOCKER_CONFIG=" + dir, "PATH=" + dir + ":" + bins.SearchPath()}, "image", "push", ref); err != nil {
		t.Fatalf("%v\n%s", err, errs)
	}
}

// What ctr makes of a checkpoint is refused with a way out, and so is a name
// that is none.
func TestPushRefuses(t *testing.T) {
	s := serve(t, false)
	k := start(t, shared, harness.RunSpec{}, "counter")
	k.Expect(t, "next", "101")
	stock := s.ref("stock:1")
	if err := k.Checkpoint(t.Context(), stock); err != nil {
		t.Fatal(err)
	}
	fails(t, shared, nil, []string{"gpuckpt image convert"}, "image", "push", stock)
	fails(t, shared, nil, []string{"not a full image name"}, "image", "push", "job")
	fails(t, shared, nil, []string{"there is no image"}, "image", "push", s.ref("nothing:1"))
	fails(t, shared, nil, []string{"there is no image", "not a full image name such as example.com/job:1"}, "restore", s.ref("nothing"))
	fails(t, shared, nil, []string{"not found"}, "image", "pull", s.ref("nothing:1"))
}
