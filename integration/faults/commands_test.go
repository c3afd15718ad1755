// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/registry"
)

// remote is a registry in memory, for all lanes.
var remote = sync.OnceValue(func() string {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	session.AtEnd(func() error { server.Close(); return nil })
	return strings.TrimPrefix(server.URL, "http://")
})

// gpuckpt runs the command line, whose points are the lane's.
func (l *lane) gpuckpt(ctx context.Context, args ...string) error {
	_, err := shared.OutputEnv(ctx, []string{
		"CONTAINERD_ADDRESS=" + shared.Address(), "CONTAINERD_NAMESPACE=" + shared.Namespace(),
		"GPUCKPT_IMAGE_PATH=" + shared.Dumps() + "-" + l.k.ID, "GPUCKPT_CONFIG=" + shared.ShimConfigPath(),
		"GPUCKPT_FAULTS_AS=" + l.k.ID,
	}, "gpuckpt", args...)
	return err
}

// tryCommand makes a fault in a command and looks. Then the command must work.
func (l *lane) tryCommand(t testing.TB, c Cell) {
	name := c.Place.Scenario.Name
	l.taken++
	ref := fmt.Sprintf("%s/%s:%d", remote(), l.k.ID, l.taken)
	do := map[string][]string{
		"image": {"checkpoint", l.k.ID, "--image", ref, "--leave-running"},
		"push":  {"image", "push", ref},
		"pull":  {"image", "pull", ref, "--snapshotter", shared.Snapshotter()},
	}
	if name != "image" {
		if err := l.gpuckpt(t.Context(), do["image"]...); err != nil {
			t.Fatal(err)
		}
	}
	if name == "pull" {
		if err := l.gpuckpt(t.Context(), do["push"]...); err != nil {
			t.Fatal(err)
		}
		l.forget(t, ref)
	}
	h := l.make(t, c, func(ctx context.Context, _ *client.Client) error { return l.gpuckpt(ctx, do[name]...) })
	t.Logf("the command's error: %v", h.err)
	h.over.Store(true)
	if c.Fault.Name == "store-full" && (h.err == nil || !strings.Contains(h.err.Error(), "no space left")) {
		t.Errorf("the content store was full, and the command's error is %v", h.err)
	}
	if !h.reached.Load() {
		t.Fatal("the place was not reached")
	}
	if h.err == nil && c.Outcome&(Through|Ends) == 0 {
		t.Error("the command succeeded")
	}
	if h.err != nil && c.Outcome == Through {
		t.Errorf("the command failed: %v", h.err)
	}
	if c.Outcome == Ends {
		l.gone(t)
		return
	}
	if status, err := l.k.Status(t.Context()); err != nil || status == client.Paused {
		if c.Outcome&Retry == 0 {
			t.Errorf("the container is %s, error %v; want it to run", status, err)
		}
		if err := l.resumeByHand(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	l.counts(t)
	if name != "push" && h.err != nil && !strings.Contains(h.err.Error(), "is complete") {
		// What kills a command that has done its work leaves it no time to say so.
		done := c.Place.Moment == "end" && c.Fault.Name == "SIGKILL"
		if _, err := shared.Client().ImageService().Get(t.Context(), ref); err == nil && done {
			if err := l.gpuckpt(t.Context(), "image", "verify", ref); err != nil {
				t.Error(err)
			}
		} else if err == nil {
			t.Errorf("%s failed and there is an image", name)
		} else if !errdefs.IsNotFound(err) {
			t.Error(err)
		}
	}
	// Once more, and what there is then is whole.
	if name == "image" {
		l.forget(t, ref)
	}
	if err := l.gpuckpt(t.Context(), do[name]...); err != nil {
		t.Fatalf("once more: %v", err)
	}
	if err := l.gpuckpt(t.Context(), "image", "verify", ref); err != nil {
		t.Fatal(err)
	}
	l.counts(t)
	l.forget(t, ref)
	if c.Fault.Name != "SIGKILL" && !c.Fault.Alone { // whose lease ends by itself
		l.leftByCommand(t)
	}
	if left := names(shared.Dumps() + "-" + l.k.ID); len(left) > 0 {
		t.Errorf("dumps are left: %q", left)
	}
}

// forget removes an image, if there is one.
func (l *lane) forget(t testing.TB, ref string) {
	t.Helper()
	if err := shared.Client().ImageService().Delete(t.Context(), ref, images.SynchronousDelete()); err != nil && !errdefs.IsNotFound(err) {
		t.Fatal(err)
	}
}

// leftByCommand checks that no lease stays for ever.
func (l *lane) leftByCommand(t testing.TB) {
	t.Helper()
	leases, err := shared.Client().LeasesService().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, lease := range leases {
		if lease.Labels["containerd.io/gc.expire"] == "" {
			t.Errorf("a lease without an end is left: %v", lease)
		}
	}
}
