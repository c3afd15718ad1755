// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"context"
	"errors"
	"fmt"
	"strings"

	tcpstream "github.com/checkpoint-restore/go-criu/v8/crit/images/tcp-stream"
	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// ErrUnsent reports data that a connection within the container had not sent when it was dumped, on a node where CRIU
// cannot keep packets away.
var ErrUnsent = fmt.Errorf("a connection within the container has data that is not sent yet, and this node has neither iptables nor a CRIU with nftables: install one of them: %w", errdefs.ErrFailedPrecondition)

// CheckUnsent refuses a dump with ErrUnsent. CRIU sends such data when it makes the socket again, and the answer of a
// kernel that does not have the other end yet resets the connection.
func CheckUnsent(ctx context.Context, dumped *image.Set, settings criu.Settings, r criu.Runner) error {
	if decided, err := settings.ConnectionsDecided(); err != nil || decided {
		return err
	}
	if locks, err := settings.LocksNetwork(ctx, r); err != nil || locks {
		return err
	}
	files, err := filesOf(dumped)
	if err != nil {
		return err
	}
	plan := Make(Place{}, files)
	for _, f := range files {
		s := f.GetIsk()
		name := fmt.Sprintf("tcp-stream-%x.img", s.GetIno())
		if s == nil || !plan.inner(s) || !dumped.Has(name) {
			continue
		}
		err = errors.Join(err, image.EachOf(dumped, name, func(t *tcpstream.TcpStreamEntry) error {
			if t.GetUnsqLen() > 0 {
				return ErrUnsent
			}
			return nil
		}))
	}
	return err
}

// IsUnsent reports whether CRIU failed because such data was sent while it read it: the kernel had less of it than it
// had said (soccr.c, recv_queue).
func IsUnsent(dump error) bool {
	return strings.Contains(dump.Error(), "(soccr/soccr.c:") && strings.Contains(dump.Error(), "recv failed (")
}
