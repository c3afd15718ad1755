// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

// Faults are all of them.
func Faults() []Fault {
	// points are the begin and the end of each step and of each undo.
	points := func(outcome func(Place) Outcome) func(Place) (Outcome, bool) {
		return func(p Place) (Outcome, bool) {
			if p.Moment == "during" {
				return 0, false
			}
			return outcome(p), true
		}
	}
	always := func(o Outcome) func(Place) (Outcome, bool) { return points(func(Place) Outcome { return o }) }
	// tried is what becomes of an operation that the fault may hit or miss.
	tried := func(p Place) Outcome {
		if p.After != "" {
			return Back | Retry
		}
		return Through | Back
	}
	return []Fault{
		{
			Name: "error", Words: "the step fails",
			Found:   "the steps before it are undone; the error names the step",
			Outcome: points(failed),
		},
		{
			Name: "delay", Words: "the step takes long",
			Found: "the operation takes longer",
			Outcome: points(func(p Place) Outcome {
				if p.After != "" {
					return Back
				}
				return Through
			}),
		},
		{
			Name: "cancel", Words: "the client cancels its request",
			Found:   "the operation is undone, or completed where it was too late",
			Outcome: points(tried),
		},
		{
			Name: "client-gone", Words: "the client dies",
			Found:   "as for a cancelled request",
			Outcome: points(tried),
		},
		{
			Name: "kill", Words: "`ctr tasks kill`",
			Found:   "the container ends; the operation fails, or is complete",
			Outcome: always(Ends),
		},
		{
			Name: "delete", Words: "`ctr tasks delete --force`",
			Found:   "the container ends and is removed; the operation fails, or is complete",
			Outcome: always(Ends),
		},
		{
			Name: "SIGKILL-shim", Words: "the shim is killed",
			Found:   "containerd ends the container and removes what is left of it",
			Outcome: always(Ends),
		},
		{
			Name: "SIGKILL-program", Words: "the program is killed",
			Found: "the container ends; the operation fails, or is complete",
			Outcome: func(p Place) (Outcome, bool) {
				return Ends, p.Moment != "during" && p.hasProgram()
			},
		},
	}
}

// hasProgram reports whether there is a process of the program.
func (p Place) hasProgram() bool {
	switch {
	case p.Scenario.Operation == "restore":
		return p.Step != "copy images" && (p.Step != "restore processes" || p.Moment == "end") && (p.Step != "kill" || p.Moment == "begin")
	case p.Scenario.Name == "checkpoint-stop":
		return p.Step != "stop" || p.Moment == "begin"
	}
	return true
}

// failed is what is found after an error of a step.
func failed(p Place) Outcome {
	switch {
	case p.After != "":
		return Back | Retry
	case p.Scenario.Name == "checkpoint-stop" && p.Step == "stop" && p.Moment == "end":
		return Ends
	case p.Scenario.Operation == "resume" && p.completed():
		return Retry
	}
	return Back
}
