// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fault has the points at which a test may stop, fail or hold an operation.
//
// A program that is built with the tag "faults" asks at each point, over the Unix socket that the
// variable GPUCKPT_FAULTS names, what is to become of the operation, and waits for the answer. So
// the test that listens there can delay the operation, have it fail, or do something to processes
// while it stands at exactly this point. Without the variable, or where nobody listens, the
// operation goes on.
//
// Each bound of a wait goes through Bound, so that a test sees it end.
//
// A program that is built without the tag, as releases are, has no points: At is nothing.
package fault

// Moments of a step.
const (
	Begin = "begin"
	End   = "end"
	// Move is in the middle of a step that moves bytes, before some of them.
	Move = "move"
)

// Over is the step at whose end an operation is over, whatever has become of it.
const Over = "over"

// Point is a place in an operation.
type Point struct {
	// Operation is "checkpoint", "restore", "suspend" or "resume"; for a command, the program.
	Operation string `json:"operation"`
	Step      string `json:"step"`
	Moment    string `json:"moment"`
	// Container is the id of the container; in a command what GPUCKPT_FAULTS_AS says, "child of
	// PID" in a worker.
	Container string `json:"container"`
	// Pid is the process that stands at the point. At fills it in.
	Pid int `json:"pid"`
}
