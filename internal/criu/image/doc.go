// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package image reads and writes CRIU's images, as far as they are known.
//
// CRIU believes its images, and whoever made a checkpoint may have written anything into
// them. So CRIU never reads the files of a checkpoint: it reads copies. Copy reads each
// file, decodes each entry with go-criu's types, refuses what is not on the allow-list and
// writes the entry again in the one form that the types have. So nothing reaches CRIU that
// this package has not understood:
//
//   - a file whose name is none of Kinds;
//   - a field that fields.txt does not name, or names as one that a restore never needs;
//   - a number outside of what fields.txt allows, an enumeration's unknown value;
//   - a string with a NUL, of which CRIU would see the begin alone;
//   - data before, between or behind the entries.
//
// Whether an image fits a container's spec is not decided here: package admission does,
// with what Set.Each returns.
//
// The pages of memory (pages-*.img) and the content of tmpfs mounts, which package tmpfs reads,
// are not read. Dir.Bind lends CRIU the files themselves.
//
// A Set has one budget for all that it reads, see Open.
package image
