// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// MaxKeys is the most keys of a node: the newest, and earlier ones.
const MaxKeys = 8

// NodeKey has the keys of the node of its name trusted by all nodes of the cluster. The node's agent
// writes it, and may write no other: the API server knows which node the agent's token is of. Whoever
// else may write one is root on all nodes. The controller deletes it when the node has been gone for a
// time.
type NodeKey struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	Spec   NodeKeySpec   `json:"spec"`
	Status NodeKeyStatus `json:"status,omitzero"`
}

// NodeKeySpec has the keys.
type NodeKeySpec struct {
	Keys []string `json:"keys"` // public, in PEM; the newest is the last
}

// NodeKeyStatus is what the controller knows of the node.
type NodeKeyStatus struct {
	Gone *metav1.Time `json:"gone,omitempty"` // since when the cluster has no node of the name
}

// DeepCopyObject is of runtime.Object.
func (k *NodeKey) DeepCopyObject() runtime.Object { return k.DeepCopy() }

// DeepCopy returns a copy that shares nothing.
func (k *NodeKey) DeepCopy() *NodeKey {
	to := *k
	k.ObjectMeta.DeepCopyInto(&to.ObjectMeta)
	to.Spec.Keys = slices.Clone(k.Spec.Keys)
	to.Status.Gone = k.Status.Gone.DeepCopy()
	return &to
}
