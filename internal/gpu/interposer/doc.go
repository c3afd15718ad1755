// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package interposer talks to libgpuckpt.so, a library that a container with the annotation
// annotations.Interposer has loaded into its programs: the interposer of each. Put puts it there.
//
// The interposer makes the program's larger GPU memory itself, so that it can give the memory back to
// the driver and have it again at the same addresses. The life of that memory in a checkpoint:
//
//		open --Park--> parked --Save--> saved --Open--> open
//
//	  - open: the program's calls reach the driver.
//	  - parked: the program's calls of the driver wait at the interposer's gate, and its GPU work is done.
//	  - saved: the GPU memory is in host memory of the process, and the driver has none of it.
//
// Park is for before the driver's lock, and Save for the moment before its checkpoint, when it is known
// where the memory will go. The driver then has little to move, and the host memory is steered into a
// file as the driver's own staging area is. After the driver has unlocked the processes, Open has the memory made and filled again. A program
// whose memory is saved never runs without it: its calls wait at the gate, whoever dies.
//
// What is read from a process is not trusted: it is of a fixed size, and no more depends on it than the
// process itself. What Open fills the memory from is checked by others, as all GPU state.
package interposer
