// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package arm64 uses on each architecture what one of them has.
package arm64

func use() { only() }
