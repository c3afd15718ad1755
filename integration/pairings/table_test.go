// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package pairings has the table of all pairings of a way out with a store, a way back and a GPU,
// and checks that each has a test that proves it, a reason why there is none, or an open issue.
package pairings

// A cell is a pairing.
type cell struct {
	out   string // how GPU memory leaves its process
	store string // where that puts it
	back  string // how a process gets it
	gpu   string // the one that it was on, or another
}

// The dimensions. docs/decisions/0042-mechanisms.md says when which way out is taken.
var (
	outs = []string{
		"driver",  // the driver alone: CRIU dumps its copy
		"steered", // the driver copies into a file
		"window",  // into a file on a disk, of which little is in memory at a time (write-through)
		"kept",    // an interposer keeps it on the GPU, a mover copies it
		"copier",  // an interposer copies it itself: suspensions, and memory that processes share
	}
	stores = []string{
		"memory", // without a name: a suspension without a spill
		"tmpfs",
		"disk", // where the directory for temporary files is, too
	}
	backs = []string{
		"in-place", // into the process that it left: left running, or resumed
		"process",  // into a new one, from a directory
		"image",    // into a new one, from an image that is unpacked
		"arriving", // the same while the image is fetched: gpuckpt restore --pull, or the snapshotter
		"mover",    // into a new one, for which a mover has filled it beforehand
	}
	gpus = []string{"same", "other"}
)

// An entry says the same of several cells: of each pairing of its words; "" stands for all. It has tests,
// or says why the pairing is not there (the tests then prove that), or what is open.
type entry struct {
	outs, stores, backs, gpus string
	tests                     string // PACKAGE.TEST, of integration/PACKAGE or of gpustate
	not, open                 string
}

const issue = "issue 39: the matrix of faults takes the way as a dimension"

var table = []entry{
	{stores: "memory", backs: "process image arriving mover", not: "memory without a name is given back to the process that it left alone"},
	{"driver", "memory", "in-place", "same", "gpustate.TestCheckpointAndRestoreInPlace", "", ""},
	{"driver", "memory", "in-place", "other", "", "", issue},
	{"steered", "memory", "in-place", "same", "suspend.TestShareGPU suspend.TestResumeByCtr", "", ""},
	{"steered", "memory", "in-place", "other", "suspend.TestAnotherGPU suspend.TestUnseenGPU", "", ""},
	{"window", "memory", "in-place", "", "suspend.TestSpillWrittenThrough gpustate.TestChoosePathWithoutMemory", "where memory is short a suspension without a spill is refused", ""},
	{"kept", "memory", "in-place", "", "suspend.TestInterposer", "a suspension is to free the GPU", ""},
	{"copier", "memory", "in-place", "same", "suspend.TestInterposer suspend.TestInterposerShared", "", ""},
	{"copier", "memory", "in-place", "other", "", "", issue},

	// On a tmpfs.
	{"driver", "tmpfs", "", "", "checkpoint.TestLeftToCRIU", "CRIU writes to a tmpfs as to a disk, and GPU state has no files", ""},
	{"window", "tmpfs", "", "", "checkpoint.TestMemoryShort", "a tmpfs is memory: refused", ""},
	{"steered kept copier", "tmpfs", "in-place", "other", "suspend.TestSpillRefused", "a program that is left running stays on its GPUs, and a spill to a tmpfs is refused", ""},
	{"steered", "tmpfs disk", "in-place", "same", "gpustate.TestCheckpointAndRestoreInPlace checkpoint.TestRestoredTwice", "", ""},
	{"steered", "tmpfs disk", "process", "same", "checkpoint.TestRestoredTwice checkpoint.TestDamagedState", "", ""},
	{"steered", "tmpfs", "process", "other", "", "", issue},
	{"steered", "tmpfs", "image arriving", "same", "registry.TestRestoreWhileItArrives registry.TestSnapshotter kubernetes.TestSnapshotter", "", ""},
	{"kept", "tmpfs disk", "in-place", "same", "gpustate.TestInterposerKept checkpoint.TestInterposerKept", "", ""},
	{"kept", "tmpfs", "process", "same", "faults.TestFaults", "", ""},
	{"copier", "tmpfs disk", "in-place", "same", "gpustate.TestInterposer suspend.TestInterposer", "", ""},
	{"copier", "tmpfs", "process", "same", "", "", issue},
	{"copier", "tmpfs", "process", "other", "workloads.TestSwapped", "", ""},

	// On a disk.
	{"driver", "disk", "in-place", "", "suspend.TestSpillRefused checkpoint.TestLeftToCRIU", "the state stays in the process: a spill is refused, and a dump is a copy", ""},
	{"driver", "disk", "process", "same", "checkpoint.TestLeftToCRIU", "", ""},
	{"driver", "disk", "process", "other", "", "", issue},
	{"driver", "disk", "image", "", "", "", issue},
	{"driver", "disk", "arriving", "", "", "CRIU's images are there before a restore begins: nothing of the GPU arrives later", ""},
	{"steered", "disk", "in-place", "other", "", "", issue},
	{"steered", "disk", "process", "other", "gpus.TestAnotherGPU gpus.TestSwapOneProcess gpus.TestSwapTwoProcesses", "", ""},
	{"steered", "disk", "image", "same", "image.TestRunResumes image.TestNativeSnapshotter", "", ""},
	{"steered", "disk", "arriving", "same", "gpustate.TestRestoreWhileArriving", "", ""},
	{"window", "disk", "in-place", "same", "checkpoint.TestWrittenThrough suspend.TestSpillWrittenThrough", "", ""},
	{"window", "disk", "process", "same", "checkpoint.TestWrittenThrough", "", ""},
	{"window", "disk", "in-place process", "other", "", "", issue},
	{"window", "disk", "image arriving", "", "", "", issue},
	{"kept", "disk", "in-place", "other", "suspend.TestInterposer", "a program that is left running stays on its GPUs, and a suspension is to free them", ""},
	{"kept", "disk", "process", "same", "checkpoint.TestInterposerKept checkpoint.TestInterposerPrefilled", "", ""},
	{"kept", "disk", "process", "other", "gpus.TestPeerAccess", "", ""},
	{"kept", "disk", "image", "same", "checkpoint.TestInterposer", "", ""},
	{"copier", "disk", "in-place", "other", "", "", issue},
	{"copier", "disk", "process", "same", "", "", issue},
	{"copier", "disk", "process", "other", "", "", issue},
	{"copier", "disk", "image", "same", "checkpoint.TestInterposerShared checkpoint.TestInterposerSharedEvents checkpoint.TestInterposerRanks", "", ""},

	// On whichever.
	{"steered", "tmpfs disk", "image arriving", "other", "", "", issue},
	{"kept", "tmpfs", "image", "", "", "", issue},
	{"kept", "disk", "image", "other", "", "", issue},
	{"kept", "tmpfs", "process", "other", "", "", issue},
	{"copier", "tmpfs", "image", "", "", "", issue},
	{"copier", "disk", "image", "other", "", "", issue},
	{"kept copier", "tmpfs disk", "arriving", "", "", "", issue},
	{"driver", "disk", "mover", "", "", "a mover fills what interposers have made, and there is none", ""},
	{"steered", "tmpfs disk", "mover", "", "", "a mover fills what interposers have made, and the driver has made this", ""},
	{"window", "disk", "mover", "", "gpustate.TestInterposerWrittenThrough", "what is written through is left to the driver", ""},
	{"kept", "disk", "mover", "same", "checkpoint.TestInterposerPrefilled", "", ""},
	{"kept", "tmpfs", "mover", "same", "", "", issue},
	{"kept", "tmpfs disk", "mover", "other", "", "", issue},
	{"copier", "tmpfs disk", "mover", "", "", "", issue},
}
