// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cuda takes the CUDA state of running processes off their GPUs and back, by the checkpoint
// functions of NVIDIA's driver (CUDA driver API, group CUDA_CHECKPOINT, from driver 570 on).
//
// The life of a CUDA process, and who changes it:
//
//	           Lock                 Checkpoint
//	running ------------> locked ------------------> checkpointed
//	        <------------        <------------------
//	           Unlock                 Restore
//
// Locked, a process's calls into CUDA block and the work it had submitted is done. Checkpointed,
// its GPU memory is in its own host memory and it holds no device file: CRIU can dump it. A process
// in which a step went wrong beyond repair is failed and can only be killed.
//
// The program gpuckpt-cuda-helper loads the driver, and this package talks to it over a socket: a
// crash in the driver, its memory and its threads stay out of the caller. The helper can enter a
// container's namespaces, and then sees the GPUs as the container does (Options.Join).
//
// A Mover is such a program as well. It copies GPU memory that no process needs to have mapped, by its
// descriptors, to files and back, beside a Checkpoint or a Restore of the processes.
//
// A thread of the driver inside the process serves the steps. In a frozen process at least the one
// that Helper.RestoreThread names must run.
package cuda
