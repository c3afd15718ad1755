// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package harness runs the project end to end: it starts a containerd of its
// own, makes images without a registry, gives containers a real or a software
// GPU, and drives everything else through the ctr program, as a user would.
//
// The life of its main thing, a [Containerd]:
//
//  1. [Start] makes a directory (root, state, socket, logs, configuration all
//     lie in it), starts the daemon and waits until it answers. The directory's
//     base name is also the containerd namespace, so that neither sockets nor
//     cgroups nor runc's state meet those of another containerd on the machine.
//  2. Tests import images ([Containerd.Import]), run containers
//     ([Containerd.Run]), checkpoint and restore them.
//  3. [Containerd.Stop], or the end of the context given to Start, ends the
//     containers, the daemon and all that it started, unmounts what is left and
//     removes the directory. Nothing of it stays on the machine.
//
// A test program that is killed outright leaves its directory; the next Start
// with the same parent directory finds that its owner is gone and cleans up.
package harness
