// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

// Target is what a State may do to its container. All pids are as this process
// counts them.
type Target interface {
	// Init returns the pid of the container's first process.
	Init() int
	// PIDs returns the pids of all processes of the container, ascending.
	PIDs() ([]int, error)
	// Freeze stops all processes and returns once they have stopped. On an error
	// some of them may be stopped.
	Freeze() error
	// Thaw lets all processes run.
	Thaw() error
	// ThawIfKilled thaws the container if its first process has been killed, since
	// nobody else will, and then returns an error that says so.
	ThawIfKilled() error
	// CloseExecs keeps processes from being exec'd into the container until reopen
	// is called. It does not stop those that are on their way in.
	CloseExecs() (reopen func())
	// RefuseStartingExecs returns an error while a process is on its way in.
	RefuseStartingExecs() error
}
