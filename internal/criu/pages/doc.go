// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package pages moves the memory of large mappings between processes and CRIU's images, in the place
// of CRIU: on all processors, where CRIU has one thread. The images stay as CRIU writes them, so
// either side can do without the other.
//
// The life of a Plan, which is one restore: NewPlan reads the images and chooses mappings. The copy
// of the images for CRIU is made by the Plan's Edit and Parts: CRIU gets the mappings, and not what
// is in them. When CRIU has restored the processes and holds their threads, Fill copies it into
// them. Nothing of the program has run until then.
//
// The life of a Dump: while the driver works, MakeRoom begins to make the pages of the new images. Begin,
// when the processes are frozen, chooses mappings and writes a list of them. With its Environment CRIU
// dumps the mappings, and nothing of what is in them (leave_out.c). Complete then writes CRIU's images
// again with all memory. The processes are only read.
//
// A mapping is chosen if it is private, has no file, can be read and written, and a process's such
// mappings hold enough memory. One that another process has at the same place stays with CRIU, which has both share the
// pages that are alike. Shared memory is chosen by its segments (segment.go), each once, whoever has it.
//
// A worker process copies (Main): it can be killed, and its memory is charged as that of GPU state.
package pages
