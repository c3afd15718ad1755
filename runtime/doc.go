// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package runtime is the task service of containerd-shim-gpuckpt-v2: runc's own,
// with the CUDA steps slotted in.
//
// What happens to a GPU container, and which call does it:
//
//	            Pause                      Checkpoint
//	running ------------> locked, frozen ------------> … GPU state saved,
//	        <------------                <------------   CRIU dump, metadata
//	            Resume                      the way back
//
// Pause locks the container's CUDA processes and then freezes its cgroup;
// Resume thaws and unlocks. Checkpoint needs a container in that state, and
// pauses it when the client has not. The lock is taken in Pause because the
// driver cannot take it later: a thread that is stopped in the middle of a CUDA
// call holds what the lock waits for (docs/results, lock-probe.txt).
//
// Before the lock the program's hook runs (package hooks), and exec'd processes end or
// wait (package execs).
//
// Checkpoint lets only the driver's own threads run, has the driver move the GPU
// state into files, freezes again, and runs runc and CRIU. Then it goes back: GPU
// state to the GPU, and, if the checkpoint has paused the container, thaw and unlock.
// A failure at any step goes back in the same way. So after Checkpoint, whatever it
// answers, the container is as it was before.
//
// Each operation is a sequence of steps with their undos, in a type whose fields are
// the results of the steps: creating in create.go, checkpointing in checkpoint.go,
// restoring in restore.go, suspending and resuming in suspend.go. Package sequence runs
// those that have a way back, and package gpustate does what concerns the GPU.
//
// A suspension takes the first half of a checkpoint and stays there, without CRIU: the
// GPUs are free for others until a Resume.
//
// A container without CUDA processes takes none of these steps.
package runtime
