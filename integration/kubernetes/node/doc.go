// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package node is a Kubernetes node of a test's own, beside whatever else runs on
// the machine: a containerd with CRI, a kubelet, a network of bridges, a device
// plugin for GPUs and a registry that asks for a password.
//
// The life of its main thing, a [Node]:
//
//  1. [Start] starts a containerd (package harness), the kubelet and the device
//     plugin, and returns when the kubelet is healthy and offers the GPUs.
//  2. Tests run pods, static ones ([Node.RunStatic]) or, on a node with an API
//     server, by kubectl ([Node.Apply]), and checkpoint them by the kubelet's API
//     ([Node.Checkpoint]).
//  3. [Node.Stop] ends the kubelet, then the pods, then containerd, and removes the
//     bridge.
//
// The kubelet has paths of its own that cannot be configured, below /var/lib and
// /var/log, and changes settings of the kernel. It sees directories and files of the
// instance there, in a mount namespace. What a network needs, a bridge and a setting
// for forwarding, is for a program in a network namespace of its own
// (harness.InOwnNetwork): a node that was killed leaves nothing of it.
package node
