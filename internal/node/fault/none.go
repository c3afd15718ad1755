// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !faults

package fault

import "time"

// At is nothing.
func At(Point) error { return nil }

// Env is empty.
func Env() []string { return []string{} }

// Bound is the bound itself.
func Bound(d time.Duration) time.Duration { return d }
