// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package staging makes, fills, writes and reads the files that hold GPU state on its way from and
// to a GPU. It traces no process: package steer puts these files where the driver copies to.
//
// The life of a File: it is made for one staging area, and filled with huge pages on half of the
// cores, ahead of the driver, which copies into what is filled (NewFile). If the checkpoint goes to
// a disk, a write-behind writes what the driver has left behind while the driver goes on. If memory
// is short, the file is on the disk itself (NewWriteThrough): pages are filled in a window ahead of
// the driver, and written and dropped behind it. When the driver is done, the file is the image.
//
// A Digester digests, copies and checks such files. It is a process, so that the page cache and the
// buffers are charged to the cgroup for staging memory, and so that a file that is cut short, or a
// kill, ends it alone. It is the same executable under another name, see IsDigester.
package staging
