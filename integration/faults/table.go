// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package faults is the table of what can go wrong at which step of which operation, and of what
// must be found then. Its tests make each fault at each point of a shim that was built with the tag
// "faults" (internal/node/fault), and look; docs/internals/faults.md is made of the same table.
//
// A Scenario is an operation with its steps and its way back (this file). A Place is a moment of a step.
// A Fault is what goes wrong, and says at which places it is made and which Outcome is right there
// (kinds.go). A Cell is a fault at a place. Phases and kinds sum cells up, and name why there are none
// (holes.go). A walk is the log of the cells that were tried (walk.go). All these make the page (page.go).
//
// A test takes a cell so (faults_test.go, lane.try):
//
//  1. The lane's container runs a program that counts on the GPU; it is restored if it does not run
//     (lane_test.go). A look notes what the container and its shim have (look_test.go).
//  2. The operation is begun. At each point the shim asks the test over a socket (control_test.go). At
//     the point of the cell the test makes the fault, by the function of that name in makers
//     (make_test.go), and then has the shim go on or fail.
//  3. The operation is over, and the fault is undone: what was stopped goes on, a full disk has room.
//  4. The judge compares what is left with the outcome and with the look.
//  5. The next checkpoint and its restore must work. A lane that fails begins again with a new container.
//
// The program's commands, such as gpuckpt image push, have points and cells of their own
// (commands_test.go).
package faults

import (
	"fmt"
	"slices"
	"strings"
)

// Outcome is what is found after a fault. More than one bit: any of these.
type Outcome int

// The outcomes.
const (
	// Through is an operation that succeeds in spite of the fault.
	Through Outcome = 1 << iota
	// Back is an operation that fails and leaves everything as it was before. Of a restore nothing
	// is left.
	Back
	// Ends is a container that has ended and has left nothing.
	Ends
	// Retry is an operation that fails, after which "ctr tasks resume" lets the container go on.
	Retry
)

// Scenario is an operation as somebody asks for it.
type Scenario struct {
	Name string
	// Words says what it is, for people.
	Words string
	// Operation is the shim's word for it.
	Operation string
	// Steps are taken in this order.
	Steps []string
	// Undos are the way back, each with the step whose failure leads there.
	Undos []Undo
	// Completes is the step after which the operation cannot be undone; "" for none.
	Completes string
	// InTurn says that the node has memory for one operation, and that another one has it at first. Of
	// the steps only these are walked.
	InTurn bool
	// Way is how GPU memory leaves its process and comes back.
	Way Way
	// Only are the steps that are walked; nil for all.
	Only []string
	// Paused says that the client has paused the container before.
	Paused bool
	// Stops says that the operation ends the container.
	Stops bool
}

// Way is how GPU memory leaves its process and comes back (docs/decisions/0042-mechanisms.md). On any but the
// first only that is walked which differs.
type Way string

// The ways.
const (
	Steered Way = ""          // the driver copies into a file in memory
	Driver  Way = "driver"    // the driver alone: CRIU dumps its copy
	Window  Way = "window"    // into a file on a disk, of which little is in memory at a time
	Kept    Way = "kept"      // an interposer keeps it on the GPU, and a mover copies it beside the rest, see kept
	Other   Way = "other GPU" // as the first, and back on another GPU
)

// Undo is a step of the way back.
type Undo struct{ Name, After string }

// Scenarios are all of them.
func Scenarios() []Scenario {
	begin := []string{"tell before", "hold execs", "pause", "preflight", "save GPU state", "dump"}
	finish := []string{"admit", "store GPU state", "write metadata"}
	back := func(after string) []Undo {
		return []Undo{
			{"end writing", after}, {"give GPU state back", after}, {"remove images", after},
			{"resume", after}, {"let execs in", after}, {"tell after", after},
		}
	}
	restore := []string{
		"copy images", "restore processes", "watch cgroup", "device nodes", "inspect", "fill memory", "map GPU state",
		"restore GPU state", "note", "open the gate", "tell restored",
	}
	spill := []string{"pause", "preflight", "make spill directory", "save GPU state", "spill"}
	resume := []string{"choose GPUs", "check spill", "give access", "give GPU state back", "thaw and unlock"}
	keeps := []string{"dump", drains}
	turn := func(middle string) []string { return []string{waits, middle, gives} }
	leave := append(slices.Clip(begin), finish...)
	return []Scenario{
		{
			Name: "checkpoint", Words: "a checkpoint that leaves the container running", Operation: "checkpoint",
			Steps: leave, Undos: back("dump"), Completes: "write metadata",
		},
		{
			Name: "checkpoint-stop", Words: "a checkpoint that ends the container", Operation: "checkpoint",
			Steps: append(slices.Clip(leave), "stop"), Undos: back("store GPU state"), Completes: "write metadata", Stops: true,
		},
		{Name: "restore", Words: "a restore", Operation: "restore", Steps: restore, Undos: []Undo{{"kill", "restore GPU state"}}},
		{
			Name: "suspend", Words: "a suspension in memory", Operation: "suspend", Steps: []string{"pause", "preflight", "save GPU state"},
			Undos: []Undo{{"give GPU state back", "save GPU state"}, {"resume", "save GPU state"}},
		},
		{
			Name: "suspend-spill", Words: "a suspension to a disk", Operation: "suspend", Steps: spill,
			Undos: []Undo{{"give GPU state back", "spill"}, {"remove spill directory", "spill"}, {"resume", "spill"}},
		},
		{
			Name: "resume", Words: "a resume from memory", Operation: "resume", Steps: resume,
			Undos: []Undo{{"take access away", "give access"}}, Completes: "give GPU state back",
		},
		{
			Name: "resume-spill", Words: "a resume from a disk", Operation: "resume", Steps: resume,
			Undos: []Undo{{"take access away", "give access"}}, Completes: "give GPU state back",
		},
		{
			Name: "checkpoint-in-turn", Words: "a checkpoint that waits for its turn, where `memory_limit` is small", Operation: "checkpoint",
			Steps: turn("save GPU state"), Completes: gives, InTurn: true,
		},
		{
			Name: "restore-in-turn", Words: "a restore that waits for its turn", Operation: "restore",
			Steps: turn("restore GPU state"), Completes: gives, InTurn: true,
		},
		{
			Name: "suspend-in-turn", Words: "a suspension that waits for its turn", Operation: "suspend",
			Steps: turn("save GPU state"), Completes: gives, InTurn: true,
		},
		{
			Name: "resume-in-turn", Words: "a resume that waits for its turn", Operation: "resume",
			Steps: turn("give GPU state back"), Completes: gives, InTurn: true,
		},
		{
			Name: "checkpoint-kept", Words: "a checkpoint with the interposer that leaves the container running", Operation: "checkpoint",
			Steps: keeps, Way: Kept,
		},
		{
			Name: "checkpoint-kept-stop", Words: "a checkpoint with the interposer that ends the container", Operation: "checkpoint",
			Steps: keeps, Undos: []Undo{{"give GPU state back", drains}}, Way: Kept, Stops: true,
		},
		{
			Name: "checkpoint-kept-paused", Words: "a checkpoint with the interposer of a container that the client has paused", Operation: "checkpoint",
			Steps: keeps, Way: Kept, Paused: true,
		},
		{
			Name: "checkpoint-kept-paused-stop", Words: "a checkpoint with the interposer that ends a container that the client has paused", Operation: "checkpoint",
			Steps: keeps, Undos: []Undo{{"give GPU state back", drains}}, Way: Kept, Paused: true, Stops: true,
		},
		{
			Name: "checkpoint-driver", Words: "a checkpoint by the driver alone", Operation: "checkpoint", Way: Driver,
			Steps: leave, Only: []string{"save GPU state", "dump"}, Undos: []Undo{{"give GPU state back", "dump"}}, Completes: "write metadata",
		},
		{
			Name: "restore-driver", Words: "a restore by the driver alone", Operation: "restore", Way: Driver,
			Steps: restore, Only: []string{"restore processes", "restore GPU state"}, Undos: []Undo{{"kill", "restore GPU state"}},
		},
		{
			Name: "checkpoint-window", Words: "a checkpoint that writes GPU state through to a disk", Operation: "checkpoint", Way: Window,
			Steps: leave, Only: []string{"save GPU state", "dump", "store GPU state"}, Undos: []Undo{{"give GPU state back", "dump"}}, Completes: "write metadata",
		},
		{
			Name: "suspend-window-spill", Words: "a suspension that writes GPU state through to a disk", Operation: "suspend", Way: Window,
			Steps: spill, Only: []string{"save GPU state", "spill"}, Undos: []Undo{{"give GPU state back", "spill"}},
		},
		{
			Name: "resume-window-spill", Words: "a resume from there", Operation: "resume", Way: Window,
			Steps: resume, Only: []string{"check spill", "give GPU state back"}, Completes: "give GPU state back",
		},
		{
			Name: "restore-other", Words: "a restore on another GPU", Operation: "restore", Way: Other,
			Steps: restore, Only: []string{"device nodes", "map GPU state", "restore GPU state"}, Undos: []Undo{{"kill", "restore GPU state"}},
		},
		{Name: "image", Words: "`gpuckpt checkpoint --image --leave-running`", Operation: Command, Steps: []string{"dump", "image"}},
		{Name: "push", Words: "`gpuckpt image push`", Operation: Command, Steps: []string{"push"}},
		{Name: "pull", Words: "`gpuckpt image pull`", Operation: Command, Steps: []string{"pull"}},
	}
}

// drains is the step that waits for a mover.
const drains = "drain GPU state"

// The steps of a turn (internal/operation/quota).
const (
	waits = "wait for a turn"
	gives = "give the turn"
)

// Command is the operation of scenarios that are commands.
const Command = "command"

// Fault is what goes wrong.
type Fault struct {
	Name string
	// Words says what goes wrong, for people.
	Words string
	// Found says what is found then, for people.
	Found string
	// Outcome returns what must be found, and false where the fault is not made.
	Outcome func(Place) (Outcome, bool)
	// Alone says that the fault touches all containers of the node.
	Alone bool
	// Command says that it is a fault of commands alone.
	Command bool
	// SoftwareOnly says that a real GPU cannot be told to do this, or has more state than the test has
	// room for.
	SoftwareOnly bool
}

// Place is where in a scenario a fault is made.
type Place struct {
	Scenario Scenario
	Step     string
	// Moment is "begin", "end" or "during".
	Moment string
	// After is the step whose end fails, so that Step is taken, which is then an undo; "" for none.
	After string
}

// String returns the name of the place.
func (p Place) String() string {
	name := p.Scenario.Name + "/" + p.Step + "/" + p.Moment
	if p.After != "" {
		name += " of the way back"
	}
	return name
}

// completed reports whether the operation cannot be undone any more.
func (p Place) completed() bool {
	if p.Scenario.Completes == "" {
		return false
	}
	for i, step := range p.Scenario.Steps {
		if step == p.Scenario.Completes {
			for j, at := range p.Scenario.Steps {
				if at == p.Step {
					return j > i || j == i && p.Moment == "end"
				}
			}
		}
	}
	return false
}

// Places are all of them: the begin and the end of each step and of each undo, and, for what lives
// only within a step, its middle.
func Places() (all []Place) {
	for _, s := range Scenarios() {
		for _, step := range s.Steps {
			if s.Only != nil && !slices.Contains(s.Only, step) {
				continue
			}
			moments := []string{"begin", "end", "during"}
			switch {
			case s.Operation == Command:
				moments = []string{"begin", "move", "end"}
			case s.InTurn && step != waits && step != gives:
				moments = []string{"during"} // the rest is walked without a turn
			case s.InTurn:
				moments = []string{"begin", "end"}
			case s.Way == Kept && step != drains:
				moments = []string{"during"} // the rest is walked without a mover
			}
			for _, moment := range moments {
				if step == "dump" && moment == "move" {
					continue // which moves no bytes itself
				}
				all = append(all, Place{Scenario: s, Step: step, Moment: moment})
			}
		}
		for _, u := range s.Undos {
			for _, moment := range []string{"begin", "end"} {
				all = append(all, Place{Scenario: s, Step: u.Name, Moment: moment, After: u.After})
			}
		}
	}
	return all
}

// Cell is a fault at a place.
type Cell struct {
	Place   Place
	Fault   Fault
	Outcome Outcome
}

// String returns the name of the cell.
func (c Cell) String() string { return fmt.Sprintf("%v/%s", c.Place, c.Fault.Name) }

// inTurn reports whether a fault is made at a place of an operation that takes a turn: what ends the
// operation, whose turn must not be lost with it, and what ends or hangs its processes.
func inTurn(p Place, f Fault) bool {
	switch f.Name {
	case "error":
		return p.Step == waits
	case "cancel", "kill", "SIGKILL-" + Shim, "SIGKILL-" + Program, "SIGKILL-" + Containerd, "no-files":
		return p.Step != gives || p.Moment == "begin"
	case "SIGKILL-" + Helper, "SIGKILL-" + Worker, "hang-" + Helper, "hang-" + Worker:
		return p.Moment == "during"
	}
	return false
}

// kept reports whether a fault is made at a place of an operation that has a mover: the mover's own
// while it copies, and all at the step that waits for it and on the way back from there.
func kept(p Place, f Fault) bool {
	return p.Moment != "during" || strings.HasSuffix(f.Name, "-"+Mover)
}

// Cells are all of them.
func Cells() (all []Cell) {
	for _, p := range Places() {
		for _, f := range Faults() {
			if p.Scenario.InTurn && !inTurn(p, f) {
				continue
			}
			if p.Scenario.Way == Kept && !kept(p, f) {
				continue
			}
			if outcome, made := f.Outcome(p); made && f.Command == (p.Scenario.Operation == Command) {
				all = append(all, Cell{p, f, outcome})
			}
		}
	}
	return all
}
