// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/status"

	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

// UnaryServerInterceptor makes the text of all errors visible, runc's service's too: a text that is not
// UTF-8 would end the connection, and containerd would end the container. Replies have what clients gave.
func (s *Service) UnaryServerInterceptor() ttrpc.UnaryServerInterceptor {
	return func(ctx context.Context, decode ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
		reply, err := method(ctx, decode)
		if err != nil {
			is := status.Convert(toGRPC(err)).Proto() // with its code and its details
			is.Message = visible.Text(is.GetMessage())
			return nil, status.FromProto(is).Err()
		}
		return reply, nil
	}
}
