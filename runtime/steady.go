// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"io/fs"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/host"
	"github.com/gpuckpt/gpuckpt/internal/sequence"
)

// steady has the container's processes frozen, so that CRIU can seize each of them, also those that are
// stopped: CRIU would freeze them itself, and then wait for these for ever. back takes the error of the
// dump, and leaves the container frozen if it was so before, else running, whatever became of CRIU. On
// an error of steady it is as it was. A container without processes is left to runc, which refuses it.
func (c *container) steady() (back func(dump error) error, err error) {
	cg, err := host.CgroupOf(c.pid)
	if c.pid == 0 || errdefs.IsNotFound(err) {
		return func(dump error) error { return dump }, nil
	}
	if err != nil {
		return nil, err
	}
	frozen, err := cg.Frozen()
	if err != nil {
		return nil, err
	}
	back = func(dump error) error {
		switch {
		case !frozen:
			err := cg.Thaw()
			if errors.Is(err, fs.ErrNotExist) { // it has ended with its dump
				err = nil
			}
			return sequence.Join(dump, err)
		case dump == nil:
			return nil
		}
		return sequence.Join(dump, cg.Freeze(), cg.ThawIfKilled(c.pid))
	}
	if !frozen {
		_, err = host.RetryFreeze(c.pid, func() (any, error) { return nil, cg.Freeze() })
	}
	if err == nil {
		err = cg.Loosen()
	}
	if err != nil {
		return nil, back(err)
	}
	return back, nil
}
