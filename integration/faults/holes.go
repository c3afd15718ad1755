// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"slices"
	"strings"
	"sync"
)

// phase is a row of the table of phases and kinds: places that belong together.
type phase struct {
	words string
	has   func(Place) bool
}

// kind is a column: faults that belong together, by their names.
type kind struct {
	words  string
	faults []string
}

// taken reports whether a place is in one of the steps of an operation, on the way there.
func taken(p Place, operation string, steps ...string) bool {
	return p.After == "" && !p.Scenario.InTurn && p.Scenario.Operation == operation && slices.Contains(steps, p.Step)
}

// phases are all of them; each place is in one, and the first point of a resume, at which the container
// is still suspended, in two.
var phases = []phase{
	{"pause: lock, freeze", func(p Place) bool {
		return taken(p, "checkpoint", "tell before", "hold execs", "pause") || taken(p, "suspend", "pause")
	}},
	{"preflight", func(p Place) bool {
		return taken(p, "checkpoint", "preflight") || taken(p, "suspend", "preflight", "make spill directory")
	}},
	{"save GPU state", func(p Place) bool { return taken(p, "checkpoint", "save GPU state") }},
	{"dump", func(p Place) bool { return taken(p, "checkpoint", "dump") }},
	{draining, func(p Place) bool { return taken(p, "checkpoint", drains) }},
	{"way back: give GPU state back", func(p Place) bool { return p.After != "" && p.Step == "give GPU state back" }},
	{"way back: all else", func(p Place) bool {
		return p.After != "" && p.Step != "give GPU state back" && p.Scenario.Operation != "restore"
	}},
	{"store, metadata, stop", func(p Place) bool {
		return taken(p, "checkpoint", "admit", "store GPU state", "write metadata", "stop")
	}},
	{"restore: processes", func(p Place) bool { return taken(p, "restore", "copy images", "restore processes") }},
	{"restore: cgroup, device nodes, inspect, memory", func(p Place) bool {
		return taken(p, "restore", "watch cgroup", "device nodes", "inspect", "fill memory")
	}},
	{"restore: map, restore GPU state, run", func(p Place) bool {
		return taken(p, "restore", "map GPU state", "restore GPU state", "note", "open the gate", "tell restored")
	}},
	{"restore: way back", func(p Place) bool { return p.After != "" && p.Scenario.Operation == "restore" }},
	{"suspend: save, spill", func(p Place) bool { return taken(p, "suspend", "save GPU state", "spill") }},
	{"suspended", func(p Place) bool { return !p.Scenario.InTurn && p.Scenario.Operation == "resume" && p.first() }},
	{"resume: choose, check, access, GPU state, run", func(p Place) bool {
		return taken(p, "resume", "choose GPUs", "check spill", "give access", "give GPU state back", "thaw and unlock")
	}},
	{"all, where it waits for its turn", func(p Place) bool { return p.Scenario.InTurn }},
	{"image, push, pull", func(p Place) bool { return p.Scenario.Operation == Command }},
}

// kinds are all of them; each fault is in one at least.
var kinds = []kind{
	{"a step fails", []string{"error", "error-and-cancel", "hook-fails"}},
	{"driver fails, hangs", []string{"gpu-lost", hangDriver}},
	{"shim dies, crashes", []string{"SIGKILL-shim", "SIGSEGV-shim", "SIGKILL-shim-of"}},
	{"CUDA helper", of(Helper)},
	{"tracer, digester", of(Worker)},
	{"mover", of(Mover)},
	{"CRIU", of(CRIU)},
	{"runc", of(Runc)},
	{"containerd", append(of(Containerd), "SIGKILL-containerd-slow-end", "SIGKILL-containerd-of")},
	{"client gone, cancels", []string{"cancel", "client-gone", "SIGTERM", "SIGKILL"}},
	{"program dies, crashes", []string{"SIGKILL-program", "SIGSEGV-program"}},
	{"task kill, delete", []string{"kill", "delete"}},
	{"pause, resume by others", []string{"pause", "resume"}},
	{"a disk is full", []string{"disk-full", "disk-fills-up", "spill-disk-full", "state-full", "rootfs-full", "store-full", recordsFull}},
	{"a disk cannot be read or written", []string{"write-error", "read-error", "io-error", "block-writes", "block-reads"}},
	{"no files, no pids", []string{"no-files", "no-pids"}},
	{"no staging memory", []string{"no-memory"}},
	{"hangs, stops, takes long", []string{"delay", "SIGSTOP-shim", "SIGSTOP-program", "SIGSTOP-helper", "SIGSTOP-worker", "SIGSTOP-mover", "SIGSTOP-runc", "SIGSTOP-CRIU", "SIGSTOP-containerd", "SIGSTOP", "hang-helper", "hang-worker", "hang-mover", "hang-runc", "hang-CRIU", hangDriver, "hook-hangs"}},
	{"two at once", []string{"error-and-cancel", "SIGKILL-helper-and-worker", "SIGKILL-helper-and-containerd"}},
}

// of are the faults of a process that the operation may survive.
func of(process string) (names []string) {
	for _, f := range Faults() {
		if strings.HasSuffix(f.Name, "-"+process) || strings.HasPrefix(f.Name, "SIGKILL-"+process+"-and-") {
			names = append(names, f.Name)
		}
	}
	return names
}

// reason is why there is no fault of a kind in some phases.
type reason struct {
	why    string
	kinds  []string
	phases []string
}

// The names of phases and kinds that reasons are about.
const (
	draining = "drain GPU state, of a program with the interposer"
	inTurns  = "all, where it waits for its turn"
	commands = "image, push, pull"
)

// reasons are all of them.
var reasons = []reason{
	{
		"CRIU runs in a dump and in a restore only.",
		[]string{"CRIU"},
		[]string{"pause: lock, freeze", "preflight", "save GPU state", "way back: give GPU state back", "way back: all else", draining, "store, metadata, stop", "suspend: save, spill", "suspended", "resume: choose, check, access, GPU state, run"},
	},
	{
		"runc runs in a pause, a dump, a restore and a thaw only.",
		[]string{"runc"},
		[]string{"preflight", "save GPU state", "way back: give GPU state back", "way back: all else", draining, "store, metadata, stop", "suspend: save, spill", "suspended"},
	},
	{
		"no tracer and no digester runs: the first is started to save GPU state, and the last ends with what it has digested.",
		[]string{"tracer, digester"},
		[]string{"pause: lock, freeze", "preflight", "way back: all else", "suspended"},
	},
	{
		"no CUDA helper is needed. One may wait for an operation that follows, and ends by itself after half a minute.",
		[]string{"CUDA helper"},
		[]string{"way back: all else", draining, "store, metadata, stop", "suspended"},
	},
	{
		"a mover copies from the end of **save GPU state** to that of **drain GPU state**. It is hit in the middle. That of a restore, without which the restore goes on, has tests of its own (TestInterposerPrefilled).",
		[]string{"mover"},
		[]string{
			"pause: lock, freeze", "preflight", "save GPU state", "way back: give GPU state back", "way back: all else", "store, metadata, stop",
			"restore: processes", "restore: cgroup, device nodes, inspect, memory", "restore: map, restore GPU state, run", "restore: way back",
			"suspend: save, spill", "suspended", "resume: choose, check, access, GPU state, run", inTurns,
		},
	},
	{
		"nothing of a checkpoint or a spill is read or written there. The way back gives GPU state back from memory. What it removes on a disk that has failed before stays there and is no checkpoint.",
		[]string{"a disk cannot be read or written"},
		[]string{"pause: lock, freeze", "restore: way back", "way back: give GPU state back", "way back: all else", "suspended"},
	},
	{
		"a turn decides when an operation begins. These faults are made in the same steps where there is no limit; with a turn, those that end the operation or a process that has a part in it.",
		[]string{"CRIU", "runc", "a disk cannot be read or written", "a disk is full", "driver fails, hangs", "no staging memory", "pause, resume by others", "two at once"},
		[]string{inTurns},
	},
	{
		"these commands ask the shim for a checkpoint, whose faults are above, and move bytes of files. What happens to the container while they do so is tested by the death of its shim.",
		[]string{"CRIU", "runc", "CUDA helper", "tracer, digester", "mover", "driver fails, hangs", "no staging memory", "pause, resume by others", "program dies, crashes", "task kill, delete"},
		[]string{commands},
	},
	{
		"a command that fails in a step is one that cannot read or write, or is ended: these are made. It has no steps of its own that are undone.",
		[]string{"a step fails", "two at once"},
		[]string{commands},
	},
	{
		"not tested: a command is started by a person, and ends with an error of the system's.",
		[]string{"no files, no pids"},
		[]string{commands},
	},
}

var cellsOnce = sync.OnceValue(Cells)

// counts returns how many cells a phase has of a kind.
func counts(k kind, ph phase) (n int) {
	for _, c := range cellsOnce() {
		if ph.has(c.Place) && slices.Contains(k.faults, c.Fault.Name) {
			n++
		}
	}
	return n
}

// whyNone returns the places of the reasons in reasons for a phase without a kind.
func whyNone(k kind, ph phase) (at []int) {
	for i, r := range reasons {
		if slices.Contains(r.kinds, k.words) && slices.Contains(r.phases, ph.words) {
			at = append(at, i)
		}
	}
	return at
}
