// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package tmpfs keeps the content of a container's tmpfs mounts in files of a checkpoint.
//
// CRIU has the content of each tmpfs put into an archive: at a dump, when it has frozen the
// processes and has linked the files that they hold open without a name, and at a restore, before
// a process opens a file. It runs `tar` of its $PATH for that, which compresses on one processor.
// Install puts this program there under that name: Main then takes tar's place.
//
// The content becomes an image of this package's own (entry.go): a table of the files, and their
// data without holes and without compression, copied by several threads. Save writes an image,
// Load restores one. Load also reads the compressed tar archives of CRIU's own way.
//
// What is mounted at /dev/shm from outside, as a pod's is, is external for CRIU. Main carries its
// content too, beside the first tmpfs that CRIU asks for (shm.go).
//
// Load trusts nothing: whoever made a checkpoint may have written anything into an image. It
// resolves every name below the mount's root, follows no link and leaves no file system.
package tmpfs
