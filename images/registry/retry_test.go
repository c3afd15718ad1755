// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

func status(code int) error {
	return fmt.Errorf("push: %w", remoteerrors.ErrUnexpectedStatus{StatusCode: code})
}

func TestWhatIsTriedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"cut off":        {io.ErrUnexpectedEOF, true},
		"reset":          {&net.OpError{Op: "read", Err: errors.New("connection reset by peer")}, true},
		"server error":   {status(503), true},
		"too many":       {status(429), true},
		"forbidden":      {status(403), false},
		"bad request":    {status(400), false},
		"no credentials": {fmt.Errorf("x: %w", docker.ErrInvalidAuthorization), false},
		"no such host":   {&net.DNSError{IsNotFound: true}, false},
		"no TLS":         {fmt.Errorf("x: %w", http.ErrSchemeMismatch), false},
		"no such image":  {fmt.Errorf("x: %w", errdefs.ErrNotFound), false},
		"full disk":      {errors.New("write: no space left on device"), false},
		"local":          {finalError{io.ErrUnexpectedEOF}, false},
	} {
		if got := transient(c.err); got != c.want {
			t.Errorf("%s: tried again %t, want %t", name, got, c.want)
		}
	}
}

func TestAttempts(t *testing.T) {
	var told []string
	o := Options{Attempts: 3, Pause: time.Nanosecond}.defaults()
	meter := images.Progress(func(s images.Step) {
		if s.Note != "" {
			told = append(told, s.Note)
		}
	}).Begin("push", 0)
	tries := 0
	err := o.attempts(t.Context(), meter, func() error { tries++; return io.ErrUnexpectedEOF })
	if tries != 3 || len(told) != 2 || !errors.Is(err, io.ErrUnexpectedEOF) || !strings.Contains(err.Error(), "3 attempts") {
		t.Errorf("%d tries, told of %v, %v", tries, told, err)
	}
	tries = 0
	if err := o.attempts(t.Context(), meter, func() error { tries++; return status(400) }); err == nil || tries != 1 {
		t.Errorf("%d tries of what cannot be mended: %v", tries, err)
	}
	tries = 0
	if err := o.attempts(t.Context(), meter, func() error {
		if tries++; tries < 2 {
			return io.ErrUnexpectedEOF
		}
		return nil
	}); err != nil || tries != 2 {
		t.Errorf("%d tries, %v", tries, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	o.Pause = time.Hour
	go cancel()
	if err := o.attempts(ctx, meter, func() error { return io.ErrUnexpectedEOF }); err == nil {
		t.Error("no error after the end of the context")
	}
}

// Nodes do not try again in step.
func TestApart(t *testing.T) {
	found := map[time.Duration]bool{}
	for range 100 {
		pause := apart(time.Second)
		if found[pause] = true; pause < time.Second/2 || pause >= 3*time.Second/2 {
			t.Errorf("a pause of a second is %s", pause)
		}
	}
	if len(found) < 2 {
		t.Error("all pauses are the same")
	}
}

func TestExplain(t *testing.T) {
	err := explain(status(401), "example.com/job:1")
	if !errors.Is(err, ErrNotAuthorized) || !strings.Contains(err.Error(), "docker login example.com") || !strings.Contains(err.Error(), "push secret") {
		t.Errorf("got %v", err)
	}
	if err := explain(http.ErrSchemeMismatch, "example.com/job:1"); !strings.Contains(err.Error(), "http://example.com in containerd's hosts.toml") {
		t.Errorf("got %v", err)
	}
	if err := explain(status(500), "example.com/job:1"); errors.Is(err, ErrNotAuthorized) || err == nil {
		t.Errorf("got %v", err)
	}
}

// What has been told is how far a blob is, also when it is read again; what moved is
// never more than its size.
func TestMoving(t *testing.T) {
	var told uint64
	progress := images.Progress(func(s images.Step) { told = s.Done })
	of := newTransfer("push", Options{Progress: progress})
	of.know(ocispec.Descriptor{Digest: "sha256:1", Size: 100})
	of.know(ocispec.Descriptor{Digest: "sha256:2", Size: 10, Annotations: map[string]string{annotations.Layer: oci.LayerGPU}})
	blob := io.NewSectionReader(bytes.NewReader(make([]byte, 100)), 0, 100)
	m := &moving{SectionReader: blob, ctx: t.Context(), of: of, digest: "sha256:1"}
	if _, err := io.CopyN(io.Discard, m, 60); err != nil || told != 60 {
		t.Fatalf("told of %d bytes, %v", told, err)
	}
	if _, err := m.Seek(0, io.SeekStart); err != nil || told != 60 {
		t.Fatalf("told of %d bytes, %v", told, err)
	}
	if _, err := io.Copy(io.Discard, m); err != nil || told != 100 {
		t.Fatalf("told of %d bytes, %v", told, err)
	}
	of.reach("sha256:2", 10, 0)
	if got, want := *of.result(), (Result{Blobs: 2, Bytes: 110, Moved: 100, Reused: 10, GPUBytes: 10, GPUReused: 10}); got != want || told != 110 {
		t.Errorf("result %+v, want %+v; told of %d bytes", got, want, told)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (&moving{SectionReader: blob, ctx: ctx, of: of, digest: "sha256:1"}).Read(make([]byte, 1)); err == nil {
		t.Error("no error after the end of the context")
	}
}
