// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package localstore

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// A containerd that is away is waited for once, and not by each step of what is undone for it.
func TestOutlastWaitsOnce(t *testing.T) {
	conn, err := grpc.NewClient("unix:"+filepath.Join(t.TempDir(), "nobody.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }() // nothing is sent
	c, err := client.NewWithConn(conn)
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now().Add(-restart)
	gone.Store(&before)
	ctx, cancel := context.WithTimeout(t.Context(), restart/2)
	defer cancel()
	asked := 0
	err = Outlast(ctx, c, func() error {
		asked++
		return errdefs.ErrUnavailable
	})
	if err == nil || asked != 1 || ctx.Err() != nil {
		t.Errorf("asked %d times, %v, %v", asked, err, ctx.Err())
	}
	// containerd's library asks for a writer as long as it is told Unavailable.
	if _, err := content.OpenWriter(ctx, Outlasting(c), content.WithRef("blob")); err == nil || ctx.Err() != nil {
		t.Errorf("a writer: %v, %v", err, ctx.Err())
	}
	gone.Store(nil)
	brief, end := context.WithTimeout(ctx, 100*time.Millisecond)
	defer end()
	if err := Outlast(brief, c, func() error { return errdefs.ErrUnavailable }); err == nil || strings.Contains(err.Error(), "has not answered") {
		t.Errorf("who asks has no more time: %v", err)
	}
	if err := Outlast(ctx, c, func() error { return nil }); err != nil || gone.Load() != nil {
		t.Errorf("%v: it is there, and gone since %v", err, gone.Load())
	}
}
