// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package criu is what this project knows of CRIU, which runc runs for each dump
// and each restore.
//
// The life of a run: Check finds the criu of the node and refuses one that is too
// old. Settings.Write writes the configuration file that runc hands to CRIU, and
// WithPath makes runc find that criu. While CRIU works a Watch ends what runc would
// wait for in vain. When CRIU fails its Log is quoted and kept, and EndAll,
// EndHalfRestored and RemoveMounts remove what CRIU has left.
//
// The images that CRIU has written are read by Images, which never trusts them:
// whoever made a checkpoint may have written anything into it.
package criu
