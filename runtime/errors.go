// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"io/fs"
	"os/exec"

	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/driverroot"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate"
)

// toGRPC adds to an error the code that clients act upon: FailedPrecondition for what
// the user must change (a program that is missing, too), DataLoss for a container that has ended by it, DeadlineExceeded for a lock that
// timed out, Unavailable for a helper that died. An error that has a code keeps it, and nil
// stays nil.
func toGRPC(err error) error {
	if _, ok := status.FromError(err); ok {
		return err
	}
	var refused *cuda.Error
	var program *fs.PathError
	var code codes.Code
	switch {
	case errors.Is(err, gpustate.ErrLost):
		code = codes.DataLoss
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.As(err, &refused) && refused.Op == "lock" && refused.Result == cuda.NotReady:
		code = codes.DeadlineExceeded
	case refused != nil,
		errors.Is(err, cuda.ErrNoDriver), errors.Is(err, cuda.ErrDriverTooOld),
		errors.Is(err, images.ErrSchema), errors.Is(err, images.ErrMalformed), errors.Is(err, images.ErrDamaged), errors.Is(err, image.ErrRefused),
		errors.Is(err, config.ErrInvalid), errors.Is(err, driverroot.ErrNotFound),
		errors.Is(err, exec.ErrNotFound), errors.As(err, &program) && program.Op == "fork/exec":
		code = codes.FailedPrecondition
	case errors.Is(err, cuda.ErrHelperGone), errors.Is(err, cuda.ErrHelperHung), errors.Is(err, cuda.ErrHelperGarbled),
		errors.Is(err, steer.ErrTracerGone), errors.Is(err, staging.ErrDigesterGone):
		code = codes.Unavailable
	default:
		code = status.Code(errgrpc.ToGRPC(err)) // which of an error that wraps two tells clients one twice
	}
	return status.Error(code, err.Error())
}
