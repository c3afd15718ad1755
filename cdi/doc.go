// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cdi knows which GPUs a container is to have: what its spec asks for and grants, which GPU
// takes the place of which GPU of a checkpoint, and which of the driver's files go with them.
//
// The way of a GPU into a container:
//
//	a request            nvidia.com/gpu=0, --gpus 1, NVIDIA_VISIBLE_DEVICES=all …
//	   | CDI, or a hook of the NVIDIA container toolkit
//	   v
//	the spec             linux.devices, cgroup rules, mounts of the driver's files
//	   | runc; at a restore CRIU, with the nodes and mounts of the dump
//	   v
//	the container        /dev/nvidiaN, which is what the driver goes by
//
// Only what stands in the spec is granted (Read). What hooks of the toolkit would do outside the
// spec, unseen by runc and CRIU, Inject does inside it.
//
// At a restore and after a suspension, Pairs decides to which GPU the state of each goes. At a
// restore Rebind decides which file of this node takes the place of each driver file of the dump.
// Both refuse, before anything is changed, what cannot work.
package cdi
