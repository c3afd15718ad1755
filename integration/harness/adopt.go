// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

// Adopt is the container of that id, which another program has made in the
// instance. port is where it listens, for Ask.
func (c *Containerd) Adopt(id string, port int) *Container {
	return &Container{ID: id, Port: port, c: c}
}
