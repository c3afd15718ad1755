// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cdi knows which GPUs a container is to have: what its spec asks for
// and what that grants on this node, which of these takes the place of which
// GPU of a checkpoint, and which of the driver's files go with them.
//
// The way of a GPU into a container, and where this package stands on it:
//
//	a request            nvidia.com/gpu=0, --gpus 1, NVIDIA_VISIBLE_DEVICES=all …
//	   | CDI, or a hook of the NVIDIA container toolkit
//	   v
//	the spec             linux.devices, cgroup rules, mounts of the driver's files
//	   | runc; at a restore CRIU, with the nodes and mounts of the dump
//	   v
//	the container        /dev/nvidiaN, which is what the driver goes by
//
// Only what stands in the spec is granted (Read). A request that nobody has
// put into the spec grants nothing, but for the hooks of the toolkit: what they
// would do outside the spec, where neither runc nor CRIU sees it, Inject does
// inside it by the node's CDI specifications.
//
// When GPU state returns, at a restore or at the end of a suspension, Pairs decides
// to which GPU the state of each goes. At a restore Rebind decides which file of
// this node takes the place of each driver file that the dump has mounted. Both
// refuse, before anything is changed, what cannot work.
package cdi
