// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package driver is the inside of gpuckpt-cuda-helper: it binds the checkpoint functions of
// NVIDIA's driver and serves package cuda's protocol with them. Only that program may import it:
// its C code acts before Go starts.
//
// The helper's life: C code (join.c) enters another process's namespaces if the environment says
// so, which a program with more than one thread may not. Go then reads requests from file
// descriptor 3. The first has the driver loaded and initialised, which brings the GPUs up; NVML
// answers what is asked for earlier. Requests for one process are served one after the other, the
// others at once. When the socket ends, the calls under way are given two minutes, since a call
// that is cut off may leave its process out of step with the driver.
//
// A helper that is a mover (cuda.Mover) also has contexts: it copies GPU memory that lives by descriptors
// to files and back, by several threads. No other helper has any, since a context takes memory of its GPU.
//
// libcuda.so.1 and libnvidia-ml.so.1 are loaded with dlopen: the program needs no driver to be
// built or started. What it loaded after it has joined a container would come from there and run
// with this program's rights. So both are loaded before, and neither net nor os/user may be
// imported, whose C parts load more.
package driver
