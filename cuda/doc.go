// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cuda takes the CUDA state of running processes off their GPUs and
// puts it back, through the checkpoint functions of NVIDIA's driver (group
// CUDA_CHECKPOINT of the CUDA driver API, driver 570 and newer).
//
// The life of a CUDA process, and who changes it:
//
//	            Lock                 Checkpoint
//	running ------------> locked ------------------> checkpointed
//	        <------------        <------------------
//	            Unlock                 Restore
//
// A process is running until someone locks it. Locked, its calls into CUDA
// block and the work it had submitted is done. Checkpointed, its GPU memory is
// in its own host memory and it holds no device file: CRIU can dump it. Restore
// leads back to locked, never straight to running. A process in which a step
// went wrong beyond repair is failed and can only be killed.
//
// This package does not load the driver. It starts the program
// gpuckpt-cuda-helper, which does, and talks to it over a socket: a crash in
// the driver, its memory and its threads stay out of the caller, and the helper
// can enter a container's namespaces, where it sees the GPUs as the container
// sees them (see Options.Join).
//
// The steps are served by a thread of the driver inside the target process. A
// process that is frozen (cgroup freezer, SIGSTOP) cannot serve them: let at
// least the thread that Helper.RestoreThread names run.
package cuda
