// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package trace

import (
	"errors"
	"os"
)

// CanSteer says whether this build can steer: it knows the machine's registers.
const CanSteer = false

var errCannotSteer = errors.New("steering is not implemented for this processor")

type (
	steering  struct{}
	quickened struct{}
)

func steer(Target) (*steering, error) { return nil, errCannotSteer }
func mapAll([]Mapping) error          { return errCannotSteer }
func abandon([]*steering) error       { return nil }
func isCopier(int, int) bool          { return false }

func quickenAll([]Thread, int) ([]quickened, []string) { return nil, nil }
func calmAll([]quickened) ([]string, error)            { return nil, nil }

func settle([]*steering) ([]Area, error) { return nil, nil }

func collect(_ []*steering, kept []*os.File) (reply, []*os.File, error) {
	return reply{}, kept, nil
}
