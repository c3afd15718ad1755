// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/opencontainers/go-digest"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
	"github.com/gpuckpt/gpuckpt/integration/registryserver"
)

// waysCase is a node with a kubelet, and a registry.
type waysCase struct {
	b      *bench
	n      *node.Node
	server *registryserver.Server
	cdi    string
	size   uint64
	ref    string // the image of ctr's container, and podRef that of a pod's
	podRef string
	alone  float64
	keep   []digest.Digest // images that are the node's own
}

// measureWays measures all ways at each rate, round by round.
func (cmd *command) measureWays(ctx context.Context, b *bench, r *report.Results, size uint64) (err error) {
	dir, err := os.MkdirTemp(b.dirs[report.OnTmpfs], "ways")
	if err != nil {
		return fmt.Errorf("make a directory for a node: %w", err)
	}
	w := &waysCase{b: b, size: size}
	defer func() { err = errors.Join(err, w.close(), os.RemoveAll(dir)) }()
	if err := w.start(ctx, dir); err != nil {
		return err
	}
	port, err := w.send(ctx)
	if err != nil {
		return err
	}
	for round := range b.rounds {
		for _, rate := range cmd.rates {
			for _, way := range []string{report.WayRestore, report.WayCtr, report.WayPod} {
				o := report.WayRun{ImageOutcome: report.ImageOutcome{Size: size, Round: round + 1}, Way: way, Rate: rate, Alone: w.alone}
				if ctx.Err() != nil || time.Now().After(b.end) {
					b.notRun = append(b.notRun, o.Name()+": the time is over")
					continue
				}
				began := time.Now()
				if err := w.once(ctx, &o, port); err != nil {
					o.Error = err.Error()
					b.logf("%s: FAILED: %s", o.Name(), o.Error)
				} else {
					_, limit := o.Limit()
					o.Verified = true
					b.logf("%s: running %s, at most %s, verified", o.Name(), report.Seconds(o.Running), report.Seconds(limit))
				}
				o.Whole = time.Since(began).Seconds()
				r.WayRuns = append(r.WayRuns, o)
			}
		}
	}
	return nil
}

// start starts the node and the registry.
func (w *waysCase) start(ctx context.Context, dir string) error {
	var err error
	if w.n, err = node.Start(ctx, node.Options{Bins: w.b.c.Bins(), GPU: w.b.c.GPU(), Dir: dir}); err != nil {
		return err
	}
	if err := w.n.SetShimConfig(shimConfig(w.n.Containerd, "staging", w.b.settings)); err != nil {
		return err
	}
	w.cdi = filepath.Join(w.n.Dir(), "cdi")
	list, err := w.n.Client().ImageService().List(ctx)
	if err != nil {
		return fmt.Errorf("list the node's images: %w", err)
	}
	for _, i := range list {
		w.keep = append(w.keep, i.Target.Digest)
	}
	w.server, err = registryserver.Start(w.b.dirs[report.OnTmpfs])
	return err
}

func (w *waysCase) close() (err error) {
	if w.n != nil {
		err = w.n.Stop()
	}
	if w.server != nil {
		err = errors.Join(err, w.server.Close())
	}
	return err
}

// waysContainer is the name of the container in each way.
const waysContainer = "ways"

// send makes an image of a container of ctr's and one of a pod's, which have other mounts, pushes them,
// and forgets them. port is where the program listens.
func (w *waysCase) send(ctx context.Context) (port int, err error) {
	of, err := newWorkload(report.Shape{Content: report.ContentPattern, Size: w.size, Procs: 1, GPUs: 1, Media: report.OnTmpfs, Mode: report.ModeExit})
	if err != nil {
		return 0, err
	}
	s, err := startContainer(ctx, w.n.Containerd, report.Ours, waysContainer, "", of, 0)
	if err != nil {
		return 0, err
	}
	w.ref, w.podRef = w.server.Ref("job:1"), w.server.Ref("pod:1")
	if err := w.push(ctx, waysContainer, w.ref, of.port); err != nil {
		return 0, err
	}
	if err := s.remove(ctx); err != nil {
		return 0, err
	}
	pod, err := w.n.RunStatic(ctx, waysContainer, w.manifest(harness.WorkloadImage, nil, of.args()...))
	if err != nil {
		return 0, err
	}
	if err := w.push(ctx, pod.Container(podContainer), w.podRef, of.port); err != nil {
		return 0, err
	}
	i := imageCase{c: w.n.Containerd}
	found, err := i.inspect(ctx, w.ref)
	if err != nil {
		return 0, err
	}
	if w.alone, err = w.server.Rate(ctx, found); err != nil {
		return 0, err
	}
	return of.port, errors.Join(w.n.DeleteStatic(ctx, waysContainer), w.forget(ctx))
}

// push makes an image of a container, which runs on, and pushes it.
func (w *waysCase) push(ctx context.Context, id, ref string, port int) error {
	if err := w.answers(ctx, port, "count", "101"); err != nil {
		return err
	}
	if err := w.n.Gpuckpt(ctx, &struct{}{}, "checkpoint", id, "--image", ref, "--leave-running"); err != nil {
		return err
	}
	return w.n.Gpuckpt(ctx, &struct{}{}, "image", "push", ref)
}

// once measures a way, and leaves nothing of the image on the node.
func (w *waysCase) once(ctx context.Context, r *report.WayRun, port int) (err error) {
	w.server.Limit(r.Rate)
	defer w.server.Limit(0)
	ctx, cancel := context.WithTimeout(ctx, runLimit+imageCopies*time.Duration(w.size/slowRate)*time.Second)
	defer cancel()
	clean := context.WithoutCancel(ctx)
	first := firstAnswer(ctx, port)
	remove := func() error { return w.n.Remove(clean, waysContainer) }
	switch r.Way {
	case report.WayRestore:
		err = w.n.Gpuckpt(ctx, &struct{}{}, "restore", w.ref, "--pull", "--name", waysContainer, "--net-host", "--gpus", "0", "--cdi-spec-dirs", w.cdi, "--snapshotter", w.n.Snapshotter())
	case report.WayCtr:
		err = w.run(ctx, port)
	case report.WayPod:
		remove = func() error { return w.n.DeleteStatic(clean, waysContainer) }
		_, err = w.n.RunStatic(ctx, waysContainer, w.manifest(w.podRef, map[string]string{annotations.Restore: "true"}, "pattern"))
	}
	r.Running, r.Fetched = first(), w.server.Sent()
	if err == nil {
		err = w.answers(ctx, port, "verify", "bad=0")
	}
	if err == nil {
		err = w.answers(ctx, port, "count", "102")
	}
	if err != nil {
		err = fmt.Errorf("%w\nthe end of containerd's log:\n%s", err, w.n.LogTail(2000))
	}
	return errors.Join(err, remove(), w.forget(clean))
}

// run pulls and runs the image with ctr.
func (w *waysCase) run(ctx context.Context, port int) error {
	if _, err := w.n.Ctr(ctx, "images", "pull", "--plain-http", "--snapshotter", w.n.Snapshotter(), w.ref); err != nil {
		return err
	}
	_, err := w.n.Run(ctx, harness.RunSpec{
		ID: waysContainer, Image: w.ref, GPUs: []int{0}, Port: port, Args: []string{"gpuwork"},
		Annotations: map[string]string{annotations.Restore: "true"},
	})
	return err
}

// podContainer is the name of a pod's container.
const podContainer = "job"

// manifest is a pod of an image, with these arguments of gpuwork.
func (w *waysCase) manifest(image string, annotations map[string]string, args ...string) string {
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": waysContainer, "namespace": node.PodNamespace, "annotations": annotations},
		"spec": map[string]any{
			"hostNetwork": true, "terminationGracePeriodSeconds": 1, "dnsPolicy": "Default",
			"containers": []any{map[string]any{
				"name": podContainer, "image": image, "imagePullPolicy": "IfNotPresent", "args": args,
				"resources": map[string]any{"limits": map[string]any{node.Resource: "1"}},
			}},
		},
	})
	if err != nil {
		panic(err) // it is made of strings and maps
	}
	return string(text)
}

// answers asks the program that listens at a port.
func (w *waysCase) answers(ctx context.Context, port int, question, want string) error {
	answer, err := harness.Ask(ctx, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), question)
	if err == nil && answer != want {
		err = fmt.Errorf("the program answers %q to %q, it should be %q", answer, question, want)
	}
	return err
}

// forget removes all images but the node's own.
func (w *waysCase) forget(ctx context.Context) error {
	list, err := w.n.Client().ImageService().List(ctx)
	if err != nil {
		return fmt.Errorf("list the images: %w", err)
	}
	for _, i := range list {
		if slices.Contains(w.keep, i.Target.Digest) {
			continue
		}
		err := w.n.Client().ImageService().Delete(ctx, i.Name, images.SynchronousDelete())
		if err != nil && !strings.Contains(err.Error(), "not found") { // CRI removes names of its own
			return fmt.Errorf("remove the image %s: %w", i.Name, err)
		}
	}
	return nil
}
