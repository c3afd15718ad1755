// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate"
)

func TestToGRPC(t *testing.T) {
	for _, test := range []struct {
		err  error
		want codes.Code
	}{
		{errors.New("something"), codes.Unknown},
		{context.Canceled, codes.Canceled},
		{context.DeadlineExceeded, codes.DeadlineExceeded},
		{&cuda.Error{Op: "lock", Result: cuda.NotReady}, codes.DeadlineExceeded},
		{&cuda.Error{Op: "checkpoint", Result: cuda.NotSupported}, codes.FailedPrecondition},
		{&cuda.Error{Op: "restore", Result: cuda.NotReady}, codes.FailedPrecondition},
		{fmt.Errorf("%w: %w", gpustate.ErrLost, &cuda.Error{Op: "restore", Result: cuda.InvalidValue}), codes.DataLoss},
		{cuda.ErrNoDriver, codes.FailedPrecondition},
		{cuda.ErrDriverTooOld, codes.FailedPrecondition},
		{images.ErrSchema, codes.FailedPrecondition},
		{images.ErrMalformed, codes.FailedPrecondition},
		{config.ErrInvalid, codes.FailedPrecondition},
		{exec.ErrNotFound, codes.FailedPrecondition},
		{exec.Command("/no/such/program").Run(), codes.FailedPrecondition},
		{&fs.PathError{Op: "open", Path: "/x", Err: os.ErrNotExist}, codes.Unknown},
		{cuda.ErrHelperGone, codes.Unavailable},
		{cuda.ErrHelperHung, codes.Unavailable},
		{cuda.ErrHelperGarbled, codes.Unavailable},
		{steer.ErrTracerGone, codes.Unavailable},
		{errdefs.ErrInvalidArgument, codes.InvalidArgument},
		{errdefs.ErrFailedPrecondition, codes.FailedPrecondition},
		{errdefs.ErrNotFound, codes.NotFound},
		{fmt.Errorf("%w: %w", errors.New("something"), errdefs.ErrFailedPrecondition), codes.FailedPrecondition},
		{status.Error(codes.NotFound, "x"), codes.NotFound},
	} {
		for _, err := range []error{test.err, fmt.Errorf("step: %w", test.err)} {
			got := toGRPC(err)
			if code := status.Code(got); code != test.want {
				t.Errorf("%v: %v, want %v", err, code, test.want)
			}
			if told := errgrpc.ToNative(got).Error(); strings.Contains(told, "\n") {
				t.Errorf("a client is told %q", told)
			}
			// Of a status the wrapped text holds the code's name as well.
			if _, has := status.FromError(err); !has && status.Convert(got).Message() != err.Error() {
				t.Errorf("%v became %q", err, status.Convert(got).Message())
			}
		}
	}
}
