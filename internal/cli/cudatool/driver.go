// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cudatool

import (
	"context"
	"os"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/driverroot"
)

// FindDriver finds the driver as a shim does.
func FindDriver() (driverroot.Place, error) {
	node, err := config.Load()
	if err != nil {
		return driverroot.Place{}, err
	}
	return driverroot.Find(node.DriverRoot, os.Getenv("LD_LIBRARY_PATH"), node.CDISpecDirs)
}

// startHelper starts a helper that loads the driver which FindDriver finds.
func startHelper(ctx context.Context, opts cuda.Options) (*cuda.Helper, error) {
	place, err := FindDriver()
	if err != nil {
		return nil, err
	}
	opts.LibraryDir = place.Dir
	return cuda.Start(ctx, opts)
}
