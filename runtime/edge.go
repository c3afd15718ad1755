// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"

	"github.com/containerd/ttrpc"

	"github.com/gpuckpt/gpuckpt/internal/node/visible/rpc"
)

// UnaryServerInterceptor makes the text of all errors visible, runc's service's too: a text that is not
// UTF-8 would end the connection, and containerd would end the container. Replies have what clients gave.
func (s *Service) UnaryServerInterceptor() ttrpc.UnaryServerInterceptor {
	return func(ctx context.Context, decode ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
		reply, err := method(ctx, decode)
		if err != nil {
			return nil, rpc.Error(toGRPC(err))
		}
		return reply, nil
	}
}
