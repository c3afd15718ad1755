// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpustate is the GPU state of one container: the memory and the contexts that its CUDA
// processes have on GPUs, and where these are now.
//
// A State is in one phase at a time. Only its methods change the phase:
//
//	           Lock            Save            Spill
//	Unlocked ------> Locked --------> Saved ---------> Spilled
//	         <------        <-------------------------
//	          Unlock             RestoreInPlace
//
//	          Prepare             Load           Map, Restore
//	Unlocked ---------> Prepared ------> Loaded --------------> Unlocked
//
// What each phase means, and which methods are legal in it:
//
//   - Unlocked: the processes run, or there are none. Legal: Lock, Prepare.
//   - Locked: the processes' CUDA calls block, and their work on GPUs is done. The GPUs hold the
//     state. Legal: Preflight, Describe, Save, Unlock. Preflight must come before Save.
//   - Saved: the driver has checkpointed the processes. Their state is in areas, ranges of
//     addresses whose bytes the State holds in files. What the data path has left to the driver is
//     in memory of the processes. Legal: Store, Spill, ChooseGPUs, RestoreInPlace. Store copies and
//     does not change the phase; its Writer works on while the state returns to the GPUs.
//   - Spilled: as Saved, but the only copy of the areas is on a disk. Legal: ChooseGPUs,
//     CheckSpilled, RestoreInPlace.
//   - Prepared, Loaded: the container is being restored from a checkpoint. Its processes come from
//     CRIU, and their state from the checkpoint's files. Legal are the methods of the Restoration
//     that Prepare has returned.
//
// A method that is not legal in the phase returns an error and changes nothing. A method that fails
// leaves the State in the phase before the call, with two exceptions, because the driver may refuse
// to undo: Save may leave the State Saved, and then RestoreInPlace can be tried again; a failed
// Restore leaves processes that must be killed.
//
// Close and Forget are legal in every phase. Close ends the helper and the tracer, which later
// calls start again; Forget also gives up the state itself.
//
// A DataPath is the way that the state takes out of the processes and back. Preflight chooses it
// (choosePath, keep). Only data paths ask which one is in use.
//
// The calls of one State take turns: its owner sees to that. Only the container runs beside.
package gpustate
