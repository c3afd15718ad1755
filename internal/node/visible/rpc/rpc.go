// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rpc makes the text of errors visible that gRPC and ttrpc send. It is apart from package visible
// for the sake of programs that start in 2 ms.
package rpc

import (
	"google.golang.org/grpc/status"

	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

// Error returns an error of gRPC's or ttrpc's with its text visible, its code and its details.
func Error(err error) error {
	if err == nil {
		return nil
	}
	is := status.Convert(err).Proto()
	is.Message = visible.Text(is.GetMessage())
	return status.FromProto(is).Err()
}
