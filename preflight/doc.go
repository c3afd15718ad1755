// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package preflight says whether a node can checkpoint, suspend and restore GPU
// containers, and what to do where it cannot.
//
// The life of a report: Find looks up the containerd that the question is
// about, since the shim gets its $PATH, its configuration and the driver's
// libraries from there. The Check functions each look at one area, change
// nothing, and give Checks: what is there, whether it will do, what does not
// work because of it, and the command that mends it. A Report is their sum.
//
// Whether a checkpoint can be restored on a node is a smaller question, which a
// scheduler asks before it places a pod: Requirements, of a checkpoint or of its
// image's annotations, against the Facts of a node or of its annotations
// (Match). Nothing of the node needs to be at hand for it.
package preflight
