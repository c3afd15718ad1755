// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package driver is the inside of gpuckpt-cuda-helper: it binds the checkpoint
// functions of NVIDIA's driver and serves package cuda's protocol with them.
// Only that program may import it: its C code acts before Go starts.
//
// The helper's life: C code (join.c) enters another process's namespaces if
// the environment says so, which a program with more than one thread may not.
// Go then reads requests from file descriptor 3. With the first the driver's
// library is loaded and initialised, which brings the GPUs up; NVML answers
// what is asked for earlier. Each request is served in a goroutine of its own,
// because each blocks a thread in the driver, but those for one process one
// after the other. When the socket ends, the calls under way are given two
// minutes, since a call that is cut off may leave its process out of step with
// the driver, and the helper exits.
//
// libcuda.so.1 and libnvidia-ml.so.1 are loaded with dlopen, so the program
// needs no driver to be built or started. After it has joined a container, this
// program loads nothing more, since it would come from the container's files
// and run with this program's rights: both libraries are loaded before, and
// neither net nor os/user may be imported, whose C parts load more. What libcuda
// loads by itself is the driver's affair.
package driver
