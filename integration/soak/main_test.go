// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package soak has many containers checkpointed, restored, suspended and resumed at once, again and
// again, and looks at what that takes of the machine: "make soak" for an hour, `make test` for some
// seconds.
package soak

import (
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	session *harness.Session
	results *harness.Results
)

func TestMain(m *testing.M) {
	harness.Main(m.Run, func(s *harness.Session) error {
		session, results = s, s.Results
		return nil
	})
}
