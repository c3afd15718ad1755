// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"

	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/internal/node/visible/rpc"
)

// UnaryServerInterceptor makes the text of all replies and errors visible, runc's service's too: a text
// that is not UTF-8 would end the connection, and containerd would end the container.
func (s *Service) UnaryServerInterceptor() ttrpc.UnaryServerInterceptor {
	return func(ctx context.Context, decode ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
		reply, err := method(ctx, decode)
		if err != nil {
			return nil, rpc.Error(toGRPC(err))
		}
		return visibleMessage(reply), nil
	}
}

func visibleMessage(m any) any {
	if m, ok := m.(proto.Message); ok {
		return rpc.Message(m)
	}
	return m
}

// publisher makes the text of all events visible, runc's service's too.
type publisher struct{ shim.Publisher }

func (p publisher) Publish(ctx context.Context, topic string, event events.Event) error {
	return p.Publisher.Publish(ctx, topic, visibleMessage(event))
}
