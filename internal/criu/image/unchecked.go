// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build gpuckpt_unchecked

package image

// Unchecked reports whether this is a build for tests that believes images, so that what comes
// after the checks can be seen at work.
const Unchecked = true
