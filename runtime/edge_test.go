// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	apievents "github.com/containerd/containerd/api/events"
	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/core/events"
	ptypes "github.com/containerd/containerd/v2/pkg/protobuf/types"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
	"github.com/gpuckpt/gpuckpt/runtime/internal/event"
)

// speaker is runc's service, with an error.
type speaker struct {
	taskAPI.TTRPCTaskService
	err error
}

func (s *speaker) State(context.Context, *taskAPI.StateRequest) (*taskAPI.StateResponse, error) {
	return nil, s.err
}

func (s *speaker) Checkpoint(context.Context, *taskAPI.CheckpointTaskRequest) (*ptypes.Empty, error) {
	return nil, s.err
}

func seen(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsGraphic(r) })
}

// Every byte that a container can put into a text comes through each edge, as text that can be seen, and
// the connection lives: through the errors of this shim and of runc's service, events, and the log of
// operations.
func TestEveryByteAtEachEdge(t *testing.T) {
	said := &speaker{}
	s := &Service{TTRPCTaskService: said}
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(s.UnaryServerInterceptor()))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RegisterTTRPC(server); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(t.Context(), l) }()
	t.Cleanup(func() { server.Close() })
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	wire := ttrpc.NewClient(conn)
	t.Cleanup(func() { wire.Close() })
	client := taskAPI.NewTTRPCTaskClient(wire)

	dir := t.TempDir()
	published := make(chan proto.Message, 1)
	announcer := event.New(t.Context(), &listener{events: published})
	for b := range 256 {
		bad := "name " + string([]byte{byte(b)}) + " of a file"
		for _, c := range []struct {
			err  error
			want codes.Code
		}{
			{errors.New(bad), codes.Unknown},
			{fmt.Errorf("%s: %w", bad, errdefs.ErrFailedPrecondition), codes.FailedPrecondition},
			{errors.Join(errors.New(bad), images.ErrDamaged), codes.FailedPrecondition},
			{&fs.PathError{Op: "open", Path: bad, Err: os.ErrNotExist}, codes.Unknown},
			{&cuda.Error{Op: "checkpoint", Result: cuda.NotSupported, Hint: bad}, codes.FailedPrecondition},
			{errgrpc.ToGRPC(fmt.Errorf("%s: %w", bad, errdefs.ErrNotFound)), codes.NotFound},
			{status.Error(codes.Unavailable, bad), codes.Unavailable},
		} {
			said.err = c.err
			for what, call := range map[string]func() error{
				"checkpoint": func() error {
					_, err := client.Checkpoint(t.Context(), &taskAPI.CheckpointTaskRequest{ID: "x"})
					return err
				},
				"state": func() error { _, err := client.State(t.Context(), &taskAPI.StateRequest{ID: "x"}); return err },
			} {
				if err := call(); status.Code(err) != c.want || !seen(status.Convert(err).Message()) {
					t.Fatalf("byte %#02x, %s: %v is %v, want a visible text and %v", b, what, c.err, err, c.want)
				}
			}
		}
		announcer.Over(t.Context(), "checkpoint", "x", time.Now(), 0, nil, errors.New(bad))
		got := (<-published).(*apievents.ContainerUpdate)
		if !seen(got.Labels[event.Error]) {
			t.Fatalf("byte %#02x: the event is %q", b, got.Labels)
		}
		if err := oplog.Append(dir, oplog.Entry{Operation: "checkpoint", Container: "x", Failed: "dump", Error: bad}); err != nil {
			t.Fatal(err)
		}
	}
	// A long text, which a client's connection would end at, or the log of operations be full of.
	said.err = fmt.Errorf("hook: %s: failed", strings.Repeat("\xff", 8<<20))
	if _, err := client.State(t.Context(), &taskAPI.StateRequest{ID: "x"}); len(status.Convert(err).Message()) > visible.Most || !strings.HasSuffix(status.Convert(err).Message(), ": failed") {
		t.Errorf("a long error is one of %d bytes: %.200v", len(err.Error()), err)
	}
	announcer.Over(t.Context(), "checkpoint", "x", time.Now(), 0, nil, said.err)
	if got := (<-published).(*apievents.ContainerUpdate); len(got.Labels[event.Error]) > visible.Most {
		t.Errorf("the event of a long error has %d bytes", len(got.Labels[event.Error]))
	}
	if err := oplog.Append(dir, oplog.Entry{Operation: "checkpoint", Container: "x", Failed: "dump", Error: said.err.Error()}); err != nil {
		t.Fatal(err)
	}
	entries, err := oplog.Read(dir)
	if err == nil && len(entries) == 257 {
		if n := len(entries[256].Error); n > visible.Most {
			t.Errorf("the log of operations has %d bytes of an error", n)
		}
		entries = entries[:256]
	}
	if err != nil || len(entries) != 256 {
		t.Fatalf("%d entries, %v", len(entries), err)
	}
	for b, e := range entries {
		if !seen(e.Error) || b >= 0x80 && !strings.Contains(e.Error, fmt.Sprintf(`\x%02x`, b)) {
			t.Errorf("byte %#02x: the log of operations has %q", b, e.Error)
		}
	}
}

// listener is containerd, as the one who takes events.
type listener struct {
	shim.Publisher
	events chan proto.Message
}

func (l *listener) Publish(_ context.Context, _ string, event events.Event) error {
	m := event.(proto.Message)
	_, err := proto.Marshal(m)
	l.events <- m
	return err
}
