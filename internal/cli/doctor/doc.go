// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package doctor finds out whether a node can checkpoint GPU containers, and what to do if not.
//
// Find looks up the containerd that the question is about, because the shim gets its $PATH, its
// configuration and the driver's libraries from there. Each Check function looks at one area,
// changes nothing, and returns Checks: what is there, whether that is enough, what does not work
// because of it, and the command that mends it. A Report is their sum.
//
// Match answers a smaller question, say of a scheduler: whether a checkpoint can be restored on a
// node. It compares the Facts of a checkpoint, or of its image's annotations, with a node's.
package doctor
