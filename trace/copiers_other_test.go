// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package trace

func smallUntraced() {}
