// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package steer

import (
	"errors"
	"os"
)

// CanSteer reports whether this build can steer: it knows the machine's registers.
const CanSteer = false

var errCannotSteer = errors.New("steering is not implemented for this processor")

type (
	steering struct{}
	copying  struct{}
)

func steer(Target, tuning) (*steering, error)                          { return nil, errCannotSteer }
func mapAll([]Mapping, func(string)) error                             { return errCannotSteer }
func stop([]*steering) ([]Area, error)                                 { return nil, nil }
func abort(_ []*steering, kept []*os.File) (reply, []*os.File, error)  { return reply{}, kept, nil }
func isCopyThread(int, int) bool                                       { return false }
func commit(_ []*steering, kept []*os.File) (reply, []*os.File, error) { return reply{}, kept, nil }

func startCopyThreads([]Thread, int, func(string)) ([]copying, []string) { return nil, nil }
func stopCopyThreads([]copying, func(string)) ([]string, error)          { return nil, nil }
