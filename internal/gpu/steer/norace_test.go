// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !race

package steer

const raceDetector = false
