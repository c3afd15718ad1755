// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

// Target is what a State may do to its container. All pids are as this process
// counts them.
type Target interface {
	// Init returns the pid of the container's first process.
	Init() int
	// Cgroup returns the container's cgroup.
	Cgroup() (Cgroup, error)
	// CloseExecs keeps processes from being exec'd into the container until reopen
	// is called. It does not stop those that are on their way in.
	CloseExecs() (reopen func())
	// RefuseStartingExecs returns an error while a process is on its way in.
	RefuseStartingExecs() error
}

// Cgroup is what a State needs of a cgroup; host.Cgroup is one.
type Cgroup interface {
	// Pids returns the pids of all processes in it, ascending.
	Pids() ([]int, error)
	// Freeze stops all processes and returns once they have stopped. On an error
	// some of them may be stopped.
	Freeze() error
	// Thaw lets all processes run.
	Thaw() error
	// ThawIfKilled thaws the cgroup if the container's first process has been
	// killed, since nobody else will, and then returns an error that says so.
	ThawIfKilled(first int) error
}
