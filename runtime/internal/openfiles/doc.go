// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package openfiles brings back what CRIU leaves out of a dump of open files: options of sockets and the
// multicast groups that they are in, the interface of a packet socket, removed segments of System V memory, how much a
// queue takes, and the mode and owner of the root directory.
//
// Save reads them when CRIU has dumped the processes and these still stand still, by copies of their
// descriptors. What a socket has is noted in a file of its own beside CRIU's images. When CRIU holds the
// restored processes at the gate, Restore compares, and has each process set for itself what differs: it
// gets nothing that it could not set.
package openfiles
