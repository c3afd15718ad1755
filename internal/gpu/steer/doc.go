// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package steer decides where NVIDIA's driver puts GPU state in host memory, and helps it to copy.
// It does so by ptrace, from a process of its own, the tracer.
//
// The life of a staging area: the driver, asked to checkpoint a process, has a thread of its own in
// that process map one area as large as the GPU memory in use, and copies into it. Left alone the
// kernel fills that area page by page on that one thread, which is the longest part of a
// checkpoint. A steered area is backed by a file that the tracer fills ahead of the driver (package
// staging): the thread's mmap loses MAP_POPULATE at its entry, and at its exit the file is mapped
// over the area (Steer). When the driver is done, an empty area replaces the file in the process
// (Stop, Commit), so that CRIU finds nothing to dump: the file is the image. Before the driver's
// restore the file is mapped over the area again (Map).
//
// While the driver copies, threads of ours help it (copythreads_amd64.go). While memory is short,
// or the file is not filled yet, the tracer throttles it (throttle_amd64.go).
//
// The tracer also holds threads for its caller (Hold, package ptrace). When it dies the kernel
// detaches from all its threads; each goes on, none is left stopped.
//
// The tracer is a process because ptrace reports a stop the way it reports a child's end, by wait4
// to the tracer: a containerd shim reaps whatever wait4 returns and would take a stop for an exit.
// It is the same executable under another name, see IsTracer.
package steer
