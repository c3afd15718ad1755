// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpustate is the GPU state of one container: the memory and the contexts
// that its CUDA processes have on GPUs, and where these are now.
//
// A State is in one phase at a time. Only its methods change the phase:
//
//		           Lock            Save             Spill
//		Unlocked ------> Locked --------> Saved ----------> Spilled
//		         <------        <--------   |                  |
//		          Unlock      RestoreInPlace                   |
//		                        <------------------------------+
//		                         CheckSpilled, RestoreInPlace
//
//		          Prepare             Load          Map, Restore
//		Unlocked ---------> Prepared ------> Loaded -------------> Unlocked
//
//	  - Unlocked: the processes run, or there are none. Lock and Prepare are legal.
//	  - Locked: the processes' CUDA calls block, and their work on GPUs is done. The
//	    GPUs hold the state. Preflight, Describe, Save and Unlock are legal.
//	  - Saved: the driver has checkpointed the processes. Their state is in areas:
//	    ranges of addresses whose bytes the State holds in files, or, for what the
//	    data path has left to the driver, in memory of the processes. Store, Spill
//	    and RestoreInPlace are legal. Store copies; it does not change the phase, and
//	    its Writer works on while the state returns to the GPUs.
//	  - Spilled: as Saved, but the only copy of the areas is on a disk.
//	    CheckSpilled and RestoreInPlace are legal.
//	  - Prepared, Loaded: the container is being restored from a checkpoint, see
//	    Restoration. Its processes come from CRIU, and their state from the
//	    checkpoint's files.
//
// A method that is not legal in the phase returns an error and changes nothing. A
// method that fails returns the State to the phase before the call. Two errors
// are the exception, because the driver may refuse to undo: Save may leave the
// State Saved, and then RestoreInPlace can be tried again; a failed Restore
// leaves processes that only the end of the container helps.
//
// Close and Forget are legal in every phase: Close ends the helper and worker
// processes, which later calls start again; Forget also gives up the state itself.
//
// A DataPath is the way that the state takes out of the processes and back. A
// State chooses one in Preflight (choosePath). It is the only choice: no code
// outside of a data path's own file asks which one is in use.
//
// The calls of one State take turns: its owner sees to that. Only the container
// itself runs beside it.
package gpustate
