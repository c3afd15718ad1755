// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"slices"
	"strings"
)

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
		if p.Scenario.Operation == "resume" && (p.completed() || p.Step == "thaw and unlock") {
			return Through | Retry // it is not suspended any more
		}
		return Through | Back
	}
	faults := []Fault{
		{
			Name: "error", Words: "the step fails",
			Found: "the steps before it are undone; the error names the step",
			Outcome: func(p Place) (Outcome, bool) {
				outcome, made := points(failed)(p)
				return outcome, made && (p.Moment == "end" || !slices.Contains(cannotFail, p.Step))
			},
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
				return Ends, p.Moment != "during" && p.has(Program)
			},
		},
		{
			Name: "SIGSEGV-shim", Words: "the shim crashes (SIGSEGV)",
			Found:   "as for a shim that is killed",
			Outcome: func(p Place) (Outcome, bool) { return Ends, p.sampled() },
		},
		{
			Name: "SIGSEGV-program", Words: "the program crashes (SIGSEGV)",
			Found: "as for a program that is killed. One that is held meanwhile crashes when it continues",
			Outcome: func(p Place) (Outcome, bool) {
				runs := p.Moment == "begin" && !p.Scenario.InTurn && slices.Contains([]string{"tell before", "pause", "tell restored"}, p.Step)
				return Ends, (runs || p.sampled()) && p.has(Program)
			},
		},
		{
			Name: "no-files", Words: "the shim can open no more files",
			Found:   "as for a step that fails",
			Outcome: points(tried),
		},
		{
			Name: "no-pids", Words: "the container can start no more processes",
			Found: "as for a step that fails, where one is to be started",
			Outcome: func(p Place) (Outcome, bool) {
				return tried(p), p.Moment != "during" && p.has(Program)
			},
		},
		{
			Name: "disk-full", Words: "the disk of the checkpoint is full",
			Found: "as for a step that fails; the error says no space left on device",
			Outcome: func(p Place) (Outcome, bool) {
				return tried(p), p.Moment != "during" && p.Scenario.Operation == "checkpoint"
			},
		},
		{
			Name: "no-memory", Words: "the cgroup of `[staging]` has no memory left",
			Found: "as for a step that fails, where some is needed. A container whose GPU state cannot be given back stays paused, until `ctr tasks resume` succeeds",
			Alone: true,
			Outcome: points(func(p Place) Outcome {
				if p.Scenario.Operation == "restore" {
					return tried(p)
				}
				return tried(p) | Retry
			}),
		},
		{
			Name: "gpu-lost", Words: "the driver refuses every call",
			Found: "as for a step that fails. A container whose GPU cannot be given back stays paused, until `ctr tasks resume` succeeds",
			Alone: true, SoftwareOnly: true,
			Outcome: func(p Place) (Outcome, bool) {
				outcome := Through | Back
				if p.Scenario.Operation != "restore" {
					outcome |= Retry
				}
				return outcome, p.Moment != "during"
			},
		},
	}
	// hit is what becomes of an operation that has lost a process. A mover that was gone is judged as missed. Only the
	// software GPU has one that is slow enough to be hit.
	hit := func(p Place, process string) Outcome {
		if process == Mover {
			return Back
		}
		return tried(p)
	}
	for _, victim := range Processes {
		faults = append(faults, Fault{
			Name: "SIGKILL-" + victim.Name, Words: victim.Words + " is killed",
			Found: victim.Killed, Alone: victim.Name == Containerd, SoftwareOnly: victim.Name == Mover,
			Outcome: func(p Place) (Outcome, bool) { return hit(p, victim.Name), p.has(victim.Name) },
		})
	}
	for _, victim := range Processes {
		if victim.Name == Containerd {
			continue
		}
		faults = append(faults, Fault{
			Name: "SIGSEGV-" + victim.Name, Words: victim.Words + " crashes (SIGSEGV)",
			Found: "as if it was killed", SoftwareOnly: victim.Name == Mover,
			Outcome: func(p Place) (Outcome, bool) {
				return hit(p, victim.Name), p.Moment == "during" && p.has(victim.Name)
			},
		})
	}
	for _, victim := range append([]Process{{Name: Shim, Words: "the shim"}, {Name: Program, Words: "the program"}}, Processes...) {
		faults = append(faults, Fault{
			Name: "SIGSTOP-" + victim.Name, Words: victim.Words + " is stopped for a moment",
			Found: "the operation takes longer", Alone: victim.Name == Containerd,
			Outcome: func(p Place) (Outcome, bool) {
				made := p.has(victim.Name)
				if victim.Name == Program { // what is stopped stays so in a checkpoint
					made = made && p.Moment != "during" && !p.Scenario.Stops
				}
				if p.After != "" {
					return Back, made
				}
				// Before the lock, which refuses a program that is stopped then.
				if victim.Name == Program && (p.Step == "tell before" || p.Step == "hold execs" || p.Step == "pause" && p.Moment == "begin") {
					return Through | Back, made
				}
				return Through, made
			},
		})
	}
	for _, victim := range Processes {
		if victim.Name == Containerd {
			continue
		}
		faults = append(faults, Fault{
			Name: "hang-" + victim.Name, Words: victim.Words + " does nothing any more",
			Found: "it is ended when its time is over; then as if it was killed",
			Alone: true, SoftwareOnly: victim.Name == Mover,
			Outcome: func(p Place) (Outcome, bool) {
				outcome := hit(p, victim.Name)
				if p.Scenario.Operation == "resume" {
					outcome |= Retry // the helper is hit as late as in the unlock
				}
				return outcome, p.Moment == "during" && p.has(victim.Name)
			},
		})
	}
	faults = append(faults, Fault{
		Name: hangDriver, Words: "the driver does nothing any more in the middle of a copy",
		Found: "it is given up after `stall_timeout`, a minute. The container stays paused, until the driver continues and `ctr tasks resume` succeeds; of a restore nothing is left",
		Alone: true, SoftwareOnly: true,
		Outcome: func(p Place) (Outcome, bool) {
			outcome := Back
			if p.Scenario.Operation != "restore" {
				outcome |= Retry
			}
			return outcome, p.Moment == "during" && p.has(Helper)
		},
	}, Fault{
		Name: "disk-fills-up", Words: "the disk of the checkpoint fills up in the middle of a write",
		Found: "as for a full disk",
		Outcome: func(p Place) (Outcome, bool) {
			return tried(p), p.Moment != "during" && p.Scenario.Operation == "checkpoint" && p.After == ""
		},
	}, Fault{
		Name: "spill-disk-full", Words: "the disk of the spill is full, or fills up in the middle of a write",
		Found: "as for a step that fails; the error says no space left on device",
		Outcome: func(p Place) (Outcome, bool) {
			outcome := Back
			if p.Step == "spill" { // which waits for what was written beside the driver
				outcome |= Through
			}
			return outcome, p.Scenario.Name == "suspend-spill" && p.Moment == "begin" && slices.Contains([]string{"make spill directory", "save GPU state", "spill"}, p.Step)
		},
	}, Fault{
		Name: "state-full", Words: "the disk of containerd's state, where the bundle is, is full",
		Found: "as for a step that fails, where something is to be written; the error says no space left on device",
		Alone: true,
		Outcome: func(p Place) (Outcome, bool) {
			return tried(p), p.Moment != "during" && p.Scenario.Operation == "restore"
		},
	}, Fault{
		Name: "rootfs-full", Words: "the disk of the container's root file system is full",
		Found: "as for a step that fails, where something is to be written",
		Alone: true,
		Outcome: func(p Place) (Outcome, bool) {
			return tried(p), p.Moment == "begin" && p.After == "" && p.Scenario.Operation == "restore"
		},
	}, Fault{
		Name: recordsFull, Words: "the disk of `state_dir` is full",
		Found: "the operation is refused, and the error says no space left on device; a resume continues without. Where the disk is full later, the record says too little and the operation continues",
		Alone: true,
		Outcome: func(p Place) (Outcome, bool) {
			if p.first() && p.Scenario.Operation != "resume" {
				return Back, true
			}
			return tried(p), p.Moment == "begin" && p.After == ""
		},
	}, Fault{
		Name: "block-writes", Words: "the block device below a file system fails to write: that of the checkpoint, or of the spill",
		Found:        "as for a step that fails; the error says input/output error, or that the file system is read-only. Files may be left there, and are no checkpoint when the disk is good again. Where GPU state is written through to that disk just then, the program ends: the disk has lost its GPU memory",
		SoftwareOnly: true,
		Outcome: func(p Place) (Outcome, bool) {
			if p.Scenario.Way == Window && p.Step == "save GPU state" {
				return Ends, p.Moment == "begin"
			}
			return Back, p.Moment == "begin" && p.After == "" && p.writesDisk()
		},
	}, Fault{
		Name: "block-reads", Words: "the block device below a file system fails to read: that of the checkpoint, or of the spill",
		Found:        "as for a step that fails, where the kernel does not have the bytes in memory; the error says input/output error. Where it has dropped them since the shim has read them, the program ends by SIGBUS in the driver. Of a restore nothing is left, and a suspended container ends",
		SoftwareOnly: true,
		Outcome: func(p Place) (Outcome, bool) {
			if p.Scenario.Name == "resume-spill" && p.Step == "give GPU state back" {
				return Ends, p.Moment == "begin" // by SIGBUS, in the driver
			}
			if p.Scenario.Name == "resume-spill" {
				return Back, p.Step == "check spill" && p.Moment == "begin"
			}
			return tried(p), p.Scenario.Name == "restore" && p.Moment == "begin" && p.After == ""
		},
	}, Fault{
		Name: "pause", Words: "`ctr tasks pause` in the middle",
		Found: "it waits for the end of the operation; `ctr tasks resume` lets the container run",
		Outcome: points(func(p Place) Outcome {
			if p.After != "" {
				return Back | Retry
			}
			return Through | Retry
		}),
	}, Fault{
		Name: "resume", Words: "`ctr tasks resume` in the middle",
		Found: "it waits for the end of the operation, and lets a container run that is suspended then",
		Outcome: points(func(p Place) Outcome {
			if p.After != "" {
				return Back | Retry
			}
			return Through
		}),
	}, Fault{
		Name: "hook-fails", Words: "a hook of the program fails", Found: "as for a step that fails, where the hook is to refuse",
		Outcome: hooked,
	}, Fault{
		Name: "hook-hangs", Words: "a hook of the program does nothing any more", Found: "it is ended when its time is over; then as if it had failed",
		Outcome: hooked,
	}, Fault{
		Name: "write-error", Words: "GPU state cannot be written", Found: "as for a step that fails",
		Outcome: func(p Place) (Outcome, bool) {
			return Back, p.Scenario.Name == "suspend-spill" && p.Step == "spill" && p.Moment == "during"
		},
	}, Fault{
		Name: "read-error", Words: "GPU state cannot be read", Found: "as for a step that fails",
		Outcome: func(p Place) (Outcome, bool) {
			return Back, p.Moment == "during" && (p.Scenario.Name == "resume-spill" && p.Step == "check spill" || p.Scenario.Name == "restore" && p.Step == "map GPU state")
		},
	})
	for _, both := range [][2]string{{Helper, Worker}, {Helper, Containerd}} {
		faults = append(faults, Fault{
			Name: "SIGKILL-" + both[0] + "-and-" + both[1], Words: "the " + both[0] + " and " + both[1] + " are killed",
			Found: "as for each of them", Alone: both[1] == Containerd,
			Outcome: func(p Place) (Outcome, bool) {
				return tried(p), p.Moment != "during" && p.has(both[0]) && p.has(both[1])
			},
		})
	}
	faults = append(faults, Fault{
		Name: "SIGKILL-containerd-slow-end", Words: "containerd is killed, and the container's first process takes seconds to end",
		Found: "as for a containerd that is killed", Alone: true,
		Outcome: func(p Place) (Outcome, bool) {
			return tried(p), p.Moment != "during" && p.Scenario.Operation == "restore" && p.has(Program)
		},
	})
	tries := func(Place) (Outcome, bool) { return Through | Back, true }
	for _, f := range []Fault{
		{
			Name: "io-error", Words: "bytes cannot be read or written", Found: "there is no image, and nothing of one; the container runs on",
			Outcome: func(p Place) (Outcome, bool) { return Back, p.Moment != "end" && p.Step != "dump" },
		},
		{
			Name: "store-full", Words: "the disk of containerd's content store is full", Found: "as for bytes that cannot be written; the error says no space left on device",
			Alone: true,
			Outcome: func(p Place) (Outcome, bool) {
				return Back, p.Moment != "end" && (p.Step == "image" || p.Step == "pull")
			},
		},
		{Name: "SIGTERM", Words: "the command is ended by Ctrl-C or SIGTERM", Found: "as for an error, unless it was done", Outcome: tries},
		{
			Name: "SIGKILL", Words: "the command is killed",
			Found:   "the image is complete, or there is none; a container that it has paused stays paused until `ctr tasks resume`; what it has written goes with its lease, in a day at most",
			Outcome: func(Place) (Outcome, bool) { return Back | Retry, true },
		},
		{
			Name: "SIGSTOP", Words: "the command is stopped for a moment", Found: "it takes longer",
			Outcome: func(Place) (Outcome, bool) { return Through, true },
		},
		{
			Name: "SIGKILL-shim-of", Words: "the shim is killed meanwhile", Found: "the container ends; the image is complete, or there is none",
			Outcome: func(p Place) (Outcome, bool) { return Ends, p.Scenario.Name == "image" },
		},
		{Name: "SIGKILL-containerd-of", Words: "containerd is killed meanwhile", Found: "as for an error; the container runs on, or stays paused until `ctr tasks resume`", Alone: true, Outcome: func(Place) (Outcome, bool) { return Through | Back | Retry, true }},
	} {
		f.Command = true
		faults = append(faults, f)
	}
	return append(faults, Fault{
		Name: "error-and-cancel", Words: "the step fails, and the client has cancelled its request",
		Found: "as for a step that fails",
		Outcome: func(p Place) (Outcome, bool) {
			outcome, made := points(failed)(p)
			return outcome | Through, made && outcome != Ends && (p.Moment == "end" || !slices.Contains(cannotFail, p.Step))
		},
	})
}

// The processes that a fault may hit.
const (
	Shim       = "shim"
	Program    = "program"
	Helper     = "helper"
	Worker     = "worker"
	Mover      = "mover"
	Runc       = "runc"
	CRIU       = "CRIU"
	Containerd = "containerd"
)

// Process is one that a fault may hit and the operation may survive.
type Process struct{ Name, Words, Killed string }

const (
	// hangDriver is the fault of a driver that hangs.
	hangDriver = "hang-driver"
	// recordsFull is the fault of a disk of records that is full. At the first place of an operation it
	// is so before the operation begins, whose first act is to write its record.
	recordsFull = "records-full"
)

// Processes are all of them.
var Processes = []Process{
	{Helper, "the CUDA helper", "another one is started, or it is as for a step that fails"},
	{Worker, "the tracer or the digester", "as for a step that fails, or no harm is done"},
	{Mover, "the mover", "the checkpoint fails; the program has its GPU memory, also one that was to end"},
	{Runc, "runc", "as for a step that fails; what CRIU has begun is ended"},
	{CRIU, "CRIU", "as for a step that fails; a restore leaves nothing"},
	{Containerd, "containerd", "the operation is undone, or completed. The next containerd has the container as it is then"},
}

// at is the number of a place in its scenario, two for each step.
func (p Place) at(step, moment string) int {
	n := 2 * slices.Index(p.Scenario.Steps, step)
	if moment == "end" {
		n++
	}
	return n
}

// between reports whether a place is, on the way there, at the end of a step or later, and at the moment
// of the last step or before.
func (p Place) between(step, last, moment string) bool {
	n := p.at(p.Step, p.Moment)
	return p.After == "" && p.at(step, "end") <= n && n <= p.at(last, moment)
}

// during are the steps in which a process lives for a while, or is at work.
var during = map[string][]string{
	Runc:   {"pause", "dump", "restore processes", "thaw and unlock"},
	CRIU:   {"dump", "restore processes"},
	Helper: {"save GPU state", "restore GPU state", "give GPU state back"},
	Worker: {"save GPU state", "spill", "map GPU state", "restore GPU state", "store GPU state"},
	Mover:  {"dump", drains},
}

// has reports whether there is the process at a place.
func (p Place) has(process string) bool {
	s := p.Scenario
	if process == Mover && s.Way != Kept || process == Worker && s.Way == Driver {
		return false
	}
	if p.Moment == "during" {
		// The tracer of a resume, and the digester of what was spilled.
		if s.Operation == "resume" && process == Worker {
			return p.Step == "give GPU state back" || strings.HasPrefix(s.Name, "resume-") && p.Step == "check spill"
		}
		return slices.Contains(during[process], p.Step)
	}
	switch process {
	case Shim, Containerd:
		return true
	case Program:
		switch {
		case s.Name == "restore-in-turn":
			return p.Step == gives
		case s.Operation == "restore":
			return p.Step != "copy images" && (p.Step != "restore processes" || p.Moment == "end") && (p.Step != "kill" || p.Moment == "begin")
		case s.Name == "checkpoint-stop":
			return p.Step != "stop" || p.Moment == "begin"
		}
		return true
	}
	if p.After != "" {
		return p.Moment == "begin" && (p.Step == "kill" || p.Step == "give GPU state back" && (process == Helper || process == Worker && s.Operation == "checkpoint"))
	}
	switch s.Operation + " " + process {
	case "checkpoint " + Helper:
		return p.between("pause", "dump", "end")
	case "checkpoint " + Worker:
		return p.between("save GPU state", "dump", "end") || p.Step == drains
	case "restore " + Helper:
		return true
	case "restore " + Worker:
		return true
	case "restore " + Runc, "restore " + CRIU:
		return p.between("restore processes", "open the gate", "begin")
	case "suspend " + Helper:
		return p.between("pause", s.Steps[len(s.Steps)-1], "end")
	case "suspend " + Worker:
		return p.between("save GPU state", s.Steps[len(s.Steps)-1], "begin") || s.Name == "suspend" && p.Step == "save GPU state" && p.Moment == "end"
	case "resume " + Helper:
		return p.between("choose GPUs", "give GPU state back", "end")
	}
	return false
}

// first reports whether a place is the first one of its operation.
func (p Place) first() bool {
	return p.After == "" && p.Step == p.Scenario.Steps[0] && p.Moment == "begin"
}

// sampled reports whether a place is one of those at which a crash by a signal is tried, which differs
// from SIGKILL in that the process may do something before it ends: the begins of the steps in which
// there is most to lose.
func (p Place) sampled() bool {
	return p.Moment == "begin" && p.After == "" && !p.Scenario.InTurn && slices.Contains([]string{
		"save GPU state", "dump", "write metadata", "spill", "restore processes", "restore GPU state", "give GPU state back", "thaw and unlock",
	}, p.Step)
}

// writesDisk reports whether a step writes to the disk of the checkpoint or of the spill, or one
// behind it does.
func (p Place) writesDisk() bool {
	switch p.Scenario.Name {
	case "checkpoint", "checkpoint-stop", "checkpoint-window":
		return slices.Contains([]string{"save GPU state", "dump", "admit", "store GPU state", "write metadata"}, p.Step)
	case "checkpoint-kept", "checkpoint-kept-stop":
		return p.Step == drains
	case "suspend-window-spill":
		return p.Step == "save GPU state"
	case "suspend-spill":
		return slices.Contains([]string{"make spill directory", "save GPU state", "spill"}, p.Step)
	}
	return false
}

// hooked is what is found after a fault of a hook.
func hooked(p Place) (Outcome, bool) {
	return Back, p.Moment == "begin" && p.After == "" && (p.Step == "tell before" || p.Step == "tell restored")
}

// cannotFail are the undos that always do what they are to.
var cannotFail = []string{"end writing", "let execs in", "tell after", "remove spill directory"}

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
