// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package arm64

func only() {}
