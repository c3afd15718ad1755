// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package trace holds the threads of processes still, and steers where the
// CUDA driver puts GPU state, by ptrace, from a process of its own.
//
// The life of a hold: the threads are frozen by their cgroup; the tracer
// seizes each (PTRACE_SEIZE) and asks it to stop (PTRACE_INTERRUPT); the cgroup
// is thawed, and each thread enters a ptrace stop before its next instruction
// in user space, while the threads that were left out run on; the cgroup is
// frozen again; the tracer lets go of every thread.
//
// The life of a staging area: the driver, asked to checkpoint a process, has a
// thread of its own in that process map one area as large as the GPU memory in
// use and copy into it. Left alone the kernel fills that area page by page on
// that one thread, the longest part of the whole. Steered, the area is backed by
// a file that the tracer fills with huge pages, on half of the cores and ahead of
// the driver: the thread's mmap loses MAP_POPULATE at its entry, and at its exit
// the file is mapped over the area (Steer). When the driver is done, an empty area
// takes the file's place (Settle, Collect), so that CRIU finds nothing to dump: the
// file is the image. Before the driver's restore the file is mapped over the area
// again (Map).
//
// While the driver copies, threads of ours in its process help it: copiers_amd64.go.
//
// The target is consistent at every instant. A system call runs in a target's
// thread with a signal frame below its stack, so that the thread returns to
// what it did by itself (inject_amd64.go). A tracer that dies lets the kernel
// detach from all its threads; each goes on, none is left stopped.
//
// The tracer is a process because ptrace reports a stop the way it reports a
// child's end, by wait4 to the tracer: a containerd shim reaps whatever wait4
// gives it and would take a stop for an exit. It is the same executable,
// started again under the name TracerName: main calls Main first, see IsTracer.
package trace
