// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// containerNameAnnotation is the name of the container that a checkpoint image was
// made of. It is not org.criu.checkpoint.container.name: by that key CRI of
// containerd 2.2 and 2.3 knows images in another form, which it refuses to run.
const containerNameAnnotation = "dev.gpuckpt.container.name"
