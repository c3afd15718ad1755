// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package ptrace holds threads of other processes, and runs system calls in them.
//
// The life of a Hold: the caller freezes processes by their cgroup. HoldThreads seizes each thread
// (PTRACE_SEIZE) and asks it to stop (PTRACE_INTERRUPT). The caller thaws the cgroup: each held
// thread enters a ptrace stop before its next instruction in user space, and the threads that were
// left out run. The caller freezes the cgroup again, and Release lets go of every thread.
//
// The life of a Thread: StopThread seizes one thread and waits until it stands still. Each Syscall
// runs one system call in it. Detach lets it go on with the registers that it had.
//
// The traced process is consistent at every instant. A system call runs with a signal frame below
// the thread's stack, so that the thread returns by itself to what it did (thread_amd64.go). If the
// tracer dies, the kernel detaches from all its threads; each runs on, and none is left stopped.
//
// All of ptrace belongs to one thread of the tracer: callers lock their goroutine to its thread,
// and the end of that thread detaches. A program that reaps all its children (a containerd shim)
// must not trace: it would take a stop for an exit.
package ptrace
