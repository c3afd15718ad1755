// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	ctdimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/registryserver"
)

// A node that has nothing of a checkpoint image restores it straight from a registry.

// remote is a checkpoint image in a registry on a loopback port, whose blobs lie in a tmpfs.
type remote struct {
	*registryserver.Server
	ref    string
	digest digest.Digest
	// has is what the container has from outside, for ctr, and cdi the directory of a CDI specification
	// of its device, for gpuckpt.
	has         harness.RunSpec
	cdi, device string
}

// way restores the image as a container of that name.
type way func(ctx context.Context, id string) error

// ways returns the ways that the documents describe.
func (r *remote) ways() map[string]way { return map[string]way{"restore": r.pull, "stock": r.run} }

// sendAway makes a checkpoint image of a container, sends it to a registry of the test's own, and
// removes the container and all of the image from the node.
func sendAway(ctx context.Context, t *testing.T, result *harness.TestResult, k *harness.Container) *remote {
	t.Helper()
	server, err := registryserver.Start(memoryDir(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	r := &remote{Server: server, ref: server.Ref("job:1")}
	var made harness.CheckpointAnswer
	if err := result.Time("checkpoint --image", func() error {
		return untilTaken(ctx, t, result, func() error { return shared.Gpuckpt(ctx, &made, "checkpoint", k.ID, "--image", r.ref) })
	}); err != nil {
		t.Fatalf("%v\n%s", err, tail(linesWith(shared.Log(), k.ID)))
	}
	r.digest = digest.Digest(made.Digest)
	t.Cleanup(func() { r.forget(t) }) // a test that fails leaves gigabytes otherwise
	notePhases(t, result, k)
	result.Number("gpu_bytes", float64(made.GPUBytes))
	result.Number("image_bytes", float64(made.Bytes))
	result.Number("dump_seconds", made.DumpSeconds)
	result.Number("build_seconds", made.BuildSeconds)
	if err := errors.Join(
		k.Remove(ctx),
		result.Time("push", func() error { return shared.Gpuckpt(ctx, &struct{}{}, "image", "push", r.ref) }),
	); err != nil {
		t.Fatal(err)
	}
	r.forget(t)
	return r
}

// forget removes the image from the node.
func (r *remote) forget(t *testing.T) {
	t.Helper()
	ctx := context.Background() // also when the test is over
	err := shared.Client().ImageService().Delete(ctx, r.ref, ctdimages.SynchronousDelete())
	if err != nil && !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	if _, err := shared.Client().ContentStore().Info(ctx, r.digest); !errdefs.IsNotFound(err) {
		t.Errorf("the image is still here: %v", err)
	}
}

// pull has "gpuckpt restore" restore the image while it arrives. The node has the image when it returns.
func (r *remote) pull(ctx context.Context, id string) error {
	args := []string{
		"restore", r.ref, "--pull", "--name", id, "--net-host", "--snapshotter", shared.Snapshotter(),
		"--log-file", filepath.Join(shared.Dir(), "logs", id+".log"), "--device", r.device, "--cdi-spec-dirs", r.cdi,
	}
	for _, m := range r.has.Mounts {
		args = append(args, "--mount", fmt.Sprintf("type=%s,src=%s,dst=%s,options=%s", m.Type, m.Source, m.Destination, strings.Join(m.Options, ":")))
	}
	for name, value := range r.has.Annotations {
		args = append(args, "--annotation", name+"="+value)
	}
	return shared.Gpuckpt(ctx, &struct{}{}, args...)
}

// run pulls the image and runs it, both by ctr, which knows nothing of checkpoints.
func (r *remote) run(ctx context.Context, id string) error {
	if _, err := shared.Ctr(ctx, "images", "pull", "--plain-http", "--snapshotter", shared.Snapshotter(), r.ref); err != nil {
		return err
	}
	spec := r.has
	spec.ID, spec.Image = id, r.ref
	spec.Annotations = map[string]string{annotations.Restore: "true"}
	maps.Copy(spec.Annotations, r.has.Annotations)
	_, err := shared.Run(ctx, spec)
	return err
}

// restore restores the image in a way, and asks its program all the while. It returns the seconds from the
// begin until the first answer, and until the last command ended.
func (r *remote) restore(ctx context.Context, t *testing.T, by way, id string, ask func(context.Context) error) (answered, ended float64) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.Limit(0)
	var failed error
	began, done := time.Now(), make(chan struct{})
	go func() {
		defer close(done)
		failed = by(ctx, id)
		if ended = time.Since(began).Seconds(); failed != nil {
			cancel() // nobody will answer
		}
	}()
	err := ask(ctx)
	answered = time.Since(began).Seconds()
	<-done
	if failed != nil || err != nil {
		t.Fatalf("restore %s: %v; asked: %v\n%s", id, failed, err, tail(linesWith(shared.Log(), id)))
	}
	return answered, ended
}

// hasPyTorch notes what start gives to a container with CUDA.
func (r *remote) hasPyTorch(t *testing.T) {
	t.Helper()
	var err error
	if r.has.Mounts, err = importImage(); err != nil {
		t.Fatal(err)
	}
	paths := nodesHere(t)
	for _, path := range paths {
		r.has.CtrFlags = append(r.has.CtrFlags, "--device", path)
	}
	r.device, r.cdi = harness.CDIKind+"=all", cdiOfNodes(t, paths)
	if os.Getenv(envInterposer) != "" {
		r.has.Annotations = map[string]string{annotations.Interposer: "true"}
	}
}

// cdiOfNodes writes a CDI specification of a device "all" with these nodes alone: the driver's libraries come
// with the host's directories.
func cdiOfNodes(t *testing.T, paths []string) (dir string) {
	t.Helper()
	type object = map[string]any
	var devices []object
	for _, path := range paths {
		devices = append(devices, object{"path": path})
	}
	data, err := json.Marshal(object{
		"cdiVersion": "0.6.0", "kind": harness.CDIKind,
		"devices": []object{{"name": "all", "containerEdits": object{"deviceNodes": devices}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "nodes.json"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// firstAnswerFromRegistry sends a server of 8B shape to a registry and restores it from there some times, in
// each way.
func firstAnswerFromRegistry(t *testing.T, result *harness.TestResult, begin func() server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	const runs = 3
	s, before := beginCold(ctx, t, result, begin)
	r := sendAway(ctx, t, result, s.Container)
	r.hasPyTorch(t)
	var answers []said
	for _, name := range slices.Sorted(maps.Keys(r.ways())) {
		var answered, ended []float64
		for run := range runs + 1 {
			var answer said
			var found state
			ask := func(ctx context.Context) error { return s.patiently(ctx, "next?session=0&words=1", &answer) }
			if run == runs { // all else is as it was: the sum before any answer
				ask = func(ctx context.Context) error { return s.patiently(ctx, "checksum", &found) }
			}
			id := fmt.Sprintf("%s-%s-%d", s.ID, name, run)
			first, whole := r.restore(ctx, t, r.ways()[name], id, ask)
			k := shared.Adopt(id, 0)
			k.RemoveAtEnd(t)
			if run < runs {
				answered, ended, answers = append(answered, first), append(ended, whole), append(answers, answer)
				result.Phases(t, k)
				result.Number("fetched_by_"+name+"_bytes", float64(r.Sent()))
			} else if !reflect.DeepEqual(found, before) {
				t.Errorf("%s: the state is %v, before it was %v", name, found, before)
			}
			k.MustRemove(t)
			r.forget(t)
		}
		t.Logf("%s: seconds until the first answer %.2f, until the command ended %.2f", name, answered, ended)
		slices.Sort(answered)
		slices.Sort(ended)
		result.Number("restored_by_"+name+"_seconds", ended[runs/2])
		result.Number("first_answer_by_"+name+"_seconds", answered[runs/2])
	}
	for _, answer := range answers {
		if answer.Place != before.Places[0]+1 || !reflect.DeepEqual(answer, answers[0]) {
			t.Errorf("after the restores the first answers are %v; the session was at %d", answers, before.Places[0])
		}
	}
}

// patiently is ask, and again where a connection came before the program ran and was lost.
func (s server) patiently(ctx context.Context, question string, answer any) error {
	for {
		err := s.ask(ctx, question, answer)
		if lost := errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF); !lost || ctx.Err() != nil {
			return err
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// The same way with a program of the tests' own, on any GPU: it goes on with all of its memory, from a node
// that has nothing of it, each time. The container's image has no command, as that of PyTorch here, and so
// has the checkpoint image.
func TestAnswerFromRegistry(t *testing.T) {
	result := results.Add(t)
	program, err := shared.Bins().Path("gpuwork")
	if err != nil {
		t.Fatal(err)
	}
	image, err := harness.BuildImage(t.Context(), harness.ImageSpec{Files: map[string]string{"/usr/bin/gpuwork": program}, Guests: gpu.LibraryFiles()})
	if err != nil {
		t.Fatal(err)
	}
	const name = "gpuckpt.test/no-command:latest"
	if err := shared.Import(t.Context(), name, image); err != nil {
		t.Fatal(err)
	}
	k := shared.Work(t, harness.RunSpec{Image: name, GPUs: []int{0}}, "pattern", "--bytes", strconv.Itoa(64<<20), "--seed", "11")
	k.Expect(t, "count", "101")
	r := sendAway(t.Context(), t, result, k)
	r.has.GPUs, r.has.Port = []int{0}, k.Port
	r.device, r.cdi = harness.CDIKind+"=0", t.TempDir()
	if err := shared.WriteCDISpec(r.cdi); err != nil {
		t.Fatal(err)
	}
	ask := func(ctx context.Context) error {
		for {
			answer, err := harness.Ask(ctx, net.JoinHostPort("127.0.0.1", strconv.Itoa(k.Port)), "verify")
			if err == nil && answer != "bad=0" {
				return fmt.Errorf("the program says %q", answer)
			}
			if err == nil || ctx.Err() != nil {
				return err
			}
		}
	}
	for name, way := range r.ways() {
		for run := range 2 {
			id := fmt.Sprintf("%s-%s-%d", k.ID, name, run)
			answered, ended := r.restore(t.Context(), t, way, id, ask)
			if sent := r.Sent(); answered <= 0 || ended <= 0 || sent < 64<<20 {
				t.Errorf("%s: the first answer after %.2f s, the end after %.2f s, %d bytes from the registry", name, answered, ended, sent)
			}
			restored := shared.Adopt(id, k.Port)
			restored.RemoveAtEnd(t)
			restored.Expect(t, "count", "102")
			restored.MustRemove(t)
			r.forget(t)
		}
	}
}
