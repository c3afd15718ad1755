// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// away is a checkpoint image in a registry, of which its containerd has nothing any more.
type away struct {
	*server
	c    *harness.Containerd
	name string
	made harness.CheckpointAnswer
	gpu  []blob // its blobs of memory and GPU state
	criu blob   // and CRIU's layer
	port int
	cdi  string
}

type blob struct {
	Digest string `json:"digest"`
	Kind   string `json:"kind"`
	Bytes  int64  `json:"bytes"`
}

// sent checkpoints a program with a pattern in three layers of GPU memory and more, and sends the
// image to a registry.
func sent(t *testing.T) *away {
	t.Helper()
	return sentBy(t, session.Own(t, harness.Options{}))
}

// sentBy is sent with a containerd that is there.
func sentBy(t *testing.T, c *harness.Containerd) *away {
	t.Helper()
	r := &away{server: serve(t, false), c: c}
	r.name = r.ref("job:1")
	k := start(t, r.c, harness.RunSpec{}, "pattern", "--bytes", "201326592", "--chunks", "3", "--seed", "7", "--host-bytes", "96M")
	k.Expect(t, "count", "101")
	r.port, r.cdi = k.Port, cdiSpec(t, r.c)
	r.made = asJSON[harness.CheckpointAnswer](t, r.c, "checkpoint", k.ID, "--image", r.name)
	memory := 0
	for _, l := range asJSON[struct {
		Image struct {
			Layers []blob `json:"layers"`
		} `json:"image"`
	}](t, r.c, "image", "inspect", r.name).Image.Layers {
		switch l.Kind {
		case "memory":
			memory++
			r.gpu = append(r.gpu, l)
		case "gpu":
			r.gpu = append(r.gpu, l)
		case "criu":
			r.criu = l
		}
	}
	if memory < 2 || len(r.gpu)-memory < 3 {
		t.Fatalf("the image has %d blobs of memory, and %d of GPU state", memory, len(r.gpu)-memory)
	}
	k.MustRemove(t)
	gpuckpt(t, r.c, "image", "push", r.name)
	forget(t, r.c)
	if has(t, r.c, r.made.Digest) {
		t.Fatal("the image is still here")
	}
	r.fetched.Store(0)
	return r
}

// disturb has the registry do that with what is fetched of GPU state.
func (r *away) disturb(with func(r *http.Request, layer int, at int64, part []byte) error) {
	meddle := func(q *http.Request, at int64, part []byte) error {
		for n, l := range r.gpu {
			if path.Base(q.URL.Path) == l.Digest {
				return with(q, n, at, part)
			}
		}
		return nil
	}
	r.meddle.Store(&meddle)
}

// args restore the image as the container of that name.
func (r *away) args(id string, more ...string) []string {
	return append([]string{"restore", r.name, "--pull", "--name", id, "--net-host", "--gpus", "0", "--cdi-spec-dirs", r.cdi, "--snapshotter", r.c.Snapshotter()}, more...)
}

// goesOn expects that the program counts on from its checkpoint with all of its memory.
func (r *away) goesOn(t *testing.T, id string) {
	t.Helper()
	k := adopt(t, r.c, id, r.port)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	k.MustRemove(t)
}

// begins waits until the restore of a container has begun: it has a task, or one whose shim does not answer until it is
// restored.
func (r *away) begins(t *testing.T, id string) {
	t.Helper()
	harness.Within(t, "the restore begins", func() bool {
		k, err := r.c.Client().LoadContainer(t.Context(), id)
		if err != nil {
			return false
		}
		soon, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = k.Task(soon, nil)
		return err == nil || soon.Err() != nil
	})
}

// gone expects that nothing runs, and that the image has no name.
func (r *away) gone(t *testing.T, id string) {
	t.Helper()
	if _, err := r.c.Client().LoadContainer(t.Context(), id); !errdefs.IsNotFound(err) {
		t.Errorf("the container %s: %v", id, err)
	}
	if _, err := r.c.Client().SnapshotService(r.c.Snapshotter()).Stat(t.Context(), id); !errdefs.IsNotFound(err) {
		t.Errorf("the snapshot %s: %v", id, err)
	}
	if _, err := r.c.Client().ImageService().Get(t.Context(), r.name); !errdefs.IsNotFound(err) {
		t.Errorf("the image %s: %v", r.name, err)
	}
}

// A restore begins before any GPU state is there. Each byte is written once, and the next restore
// needs no registry.
func TestRestoreWhileItArrives(t *testing.T) {
	r := sent(t)
	var begun sync.Once
	r.disturb(func(q *http.Request, _ int, _ int64, _ []byte) (err error) {
		begun.Do(func() {
			for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
				k, kerr := r.c.Client().LoadContainer(t.Context(), "arriving")
				if kerr == nil {
					if _, kerr = k.Task(t.Context(), nil); kerr == nil {
						return
					}
				}
				if time.Now().After(deadline) || q.Context().Err() != nil {
					err = errors.New("the restore does not begin without GPU state")
					return
				}
			}
		})
		return err
	})
	if out := gpuckpt(t, r.c, r.args("arriving")...); out != "arriving\n" {
		t.Errorf("gpuckpt restore printed %q", out)
	}
	k := adopt(t, r.c, "arriving", r.port)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	if got := r.fetched.Load(); got > int64(r.made.Bytes)*21/20 {
		t.Errorf("%d bytes were fetched of an image of %d", got, r.made.Bytes)
	}
	for _, l := range r.gpu {
		if !has(t, r.c, l.Digest) {
			t.Errorf("containerd's content store does not have %s", l.Digest)
		}
	}
	if leases, err := r.c.Client().LeasesService().List(t.Context()); err != nil || len(leases) > 0 {
		t.Errorf("leases are left: %v, %v", leases, err)
	}

	// The container can be checkpointed, and the image is one like any other that was pulled.
	gpuckpt(t, r.c, "checkpoint", k.ID, "--image", "gpuckpt.test/arrived:1")
	k.MustRemove(t)
	before := r.fetched.Load()
	k = resume(t, r.c, r.name, r.port)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	again := asJSON[harness.CheckpointAnswer](t, r.c, "checkpoint", k.ID, "--image", "gpuckpt.test/again:1")
	k.MustRemove(t)
	if again.GPUBytes < r.made.GPUBytes {
		t.Errorf("the second checkpoint has %d bytes of GPU state, the first %d", again.GPUBytes, r.made.GPUBytes)
	}
	gpuckpt(t, r.c, r.args("once-more")...)
	r.goesOn(t, "once-more")
	if got := r.fetched.Load(); got != before {
		t.Errorf("%d bytes were fetched again", got-before)
	}
	gpuckpt(t, r.c, "image", "verify", r.name)
	gpuckpt(t, r.c, "image", "push", r.name, r.ref("elsewhere:1"))
	if out := gpuckpt(t, r.c, "ls"); !strings.Contains(out, r.name) {
		t.Errorf("gpuckpt ls prints %s", out)
	}
}

// once makes a disturbance that happens once at each place.
type once struct {
	mu   sync.Mutex
	seen map[[2]int64]bool
}

func (o *once) at(layer int, place int64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.seen == nil {
		o.seen = make(map[[2]int64]bool)
	}
	key := [2]int64{int64(layer), place}
	first := !o.seen[key]
	o.seen[key] = true
	return first
}

// What a registry does wrong once is mended, and what it does wrong for good refuses the restore.
// What has arrived by then is not fetched again. Where the name is another container's, nothing is fetched.
func TestDisturbedArrival(t *testing.T) {
	r := sent(t)
	taken, err := r.c.Client().NewContainer(t.Context(), "taken", client.WithNewSpec())
	if err != nil {
		t.Fatal(err)
	}
	fails(t, r.c, nil, []string{"the name taken is in use"}, r.args("taken")...)
	if got := r.fetched.Load(); got > 0 {
		t.Errorf("%d bytes were fetched for a name that is in use", got)
	}
	if err := taken.Delete(t.Context()); err != nil {
		t.Error(err)
	}
	cut := errors.New("the test cuts the connection")

	// Once in each chunk: a broken connection. Once in one layer: wrong bytes, at the end.
	last := len(r.gpu) - 1
	var cuts, wrong once
	r.disturb(func(_ *http.Request, layer int, at int64, part []byte) error {
		if at > 0 && cuts.at(layer, at>>22) {
			return cut
		}
		if layer == last && at > r.gpu[layer].Bytes-1<<20 && wrong.at(layer, 0) {
			part[0] ^= 1
		}
		return nil
	})
	out, errs, err := try(t, r.c, nil, r.args("mended")...)
	if err != nil {
		t.Fatalf("%v\n%s%s\n%s", err, out, errs, r.c.LogTail(3000))
	}
	if len(cuts.seen) < len(r.gpu) || len(wrong.seen) < 1 {
		t.Errorf("%d connections were cut, %d layers wrong", len(cuts.seen), len(wrong.seen))
	}
	if !strings.Contains(errs, "trying again: fetch "+r.gpu[last].Digest) {
		t.Errorf("gpuckpt restore does not say that it has tried again:\n%s", errs)
	}
	r.goesOn(t, "mended")
	forget(t, r.c)

	// Wrong bytes for good, in the last layer.
	r.disturb(func(_ *http.Request, layer int, at int64, part []byte) error {
		if layer == last && at > 1<<20 {
			part[0] ^= 1
		}
		return nil
	})
	fails(t, r.c, nil, []string{"restore " + r.name, r.gpu[last].Digest, "given up after 2 attempts"}, r.args("wrong", "--attempts", "2", "--parallel", "1")...)
	r.gone(t, "wrong")

	// The registry goes away in the middle of that layer.
	before := r.fetched.Load()
	r.disturb(func(_ *http.Request, layer int, at int64, _ []byte) error {
		if layer == last && at > r.gpu[last].Bytes/2 {
			return cut
		}
		return nil
	})
	fails(t, r.c, nil, []string{"restore " + r.name, r.gpu[last].Digest, "given up after 2 attempts"}, r.args("away", "--attempts", "2", "--parallel", "1")...)
	r.gone(t, "away")
	if got := r.fetched.Load() - before; got > r.gpu[last].Bytes*5/4 {
		t.Errorf("%d bytes were fetched, and only a layer of %d was missing", got, r.gpu[last].Bytes)
	}

	// A node that does not restore it asks for no GPU state in vain.
	undo := r.c.Configured(t, "[restore]\npolicy = \"never\"\n")
	fails(t, r.c, nil, []string{"this node allows none"}, r.args("never")...)
	r.gone(t, "never")
	undo()
	r.meddle.Store(nil)
	gpuckpt(t, r.c, r.args("at-last")...)
	r.goesOn(t, "at-last")
}

// Whoever presses Ctrl-C while GPU state arrives has no container and no image.
func TestInterruptedArrival(t *testing.T) {
	r := sent(t)
	waits := make(chan struct{})
	var begun sync.Once
	r.disturb(func(q *http.Request, _ int, _ int64, _ []byte) error {
		begun.Do(func() { close(waits) })
		<-q.Context().Done()
		return q.Context().Err()
	})
	cmd := command(t.Context(), t, r.c, nil, r.args("interrupted")...)
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-waits
	r.begins(t, "interrupted")
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !strings.HasSuffix(errs.String(), ": interrupted\n") {
		t.Errorf("gpuckpt ended with %v and %s", err, errs.String())
	}
	t.Log(errs.String()) // in a way back that failed is the reason
	r.gone(t, "interrupted")
	r.meddle.Store(nil)
	gpuckpt(t, r.c, r.args("after")...)
	r.goesOn(t, "after")
}
