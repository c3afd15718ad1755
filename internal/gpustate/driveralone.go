// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"

	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// driverAlone leaves the state in memory of the processes, which the driver
// allocates and CRIU dumps. There are no areas.
type driverAlone struct{}

func (driverAlone) Save(_ context.Context, _ *Job, _ string, checkpoint func() error) ([]Area, error) {
	return nil, checkpoint()
}

func (driverAlone) Store(context.Context, *staging.Digester, []Area, string, bool) ([][]string, error) {
	return nil, nil
}

func (driverAlone) Restore(context.Context, *Job, []Area) (func(context.Context), error) {
	return func(context.Context) {}, nil
}

func (driverAlone) Abort(*Job) error { return nil }
