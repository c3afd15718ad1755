// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Migration asks for a pod to go on elsewhere, once. Its controller makes the new pod with a gate
// that keeps it from being scheduled, has a Checkpoint of the old one made, opens the gate, waits
// until the new pod is ready, and deletes the old one. A failure deletes the new pod instead.
type Migration struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	Spec   MigrationSpec   `json:"spec"`
	Status MigrationStatus `json:"status,omitzero"`
}

// MigrationSpec is what is asked for.
type MigrationSpec struct {
	// Pod is the name of a pod in the object's namespace, which no controller owns.
	Pod string `json:"pod"`
	// NewPod is the name of the pod that goes on; empty: the object's.
	NewPod string `json:"newPod,omitempty"`
	// NodeName is the node to go to. NodeSelector has labels of the nodes that will do, beside those
	// that the pod asks for. Without NodeName any node will do but the pod's own.
	NodeName     string            `json:"nodeName,omitempty"`
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// Repository, PushSecret and TimeoutSeconds are those of the Checkpoint.
	Repository     string `json:"repository"`
	PushSecret     string `json:"pushSecret,omitempty"`
	TimeoutSeconds int64  `json:"timeoutSeconds,omitempty"`
	// PullSecret is given to the new pod; empty: PushSecret.
	PullSecret string `json:"pullSecret,omitempty"`
	// DeleteFirst has the old pod gone before the new one starts: the two never run at once. When the
	// restore fails then, the new pod stays for the kubelet to try on.
	DeleteFirst bool `json:"deleteFirst,omitempty"`
	// ReadySeconds is how long the new pod may take from when it may start until it is ready; 0: 600.
	ReadySeconds int64 `json:"readySeconds,omitempty"`
}

// What a Migration has done: types of conditions beside Waiting, Complete and Failed.
const (
	Checkpointed = "Checkpointed"
	Released     = "Released" // the new pod may start
	Restored     = "Restored"
)

// MigrationStatus is what came of it.
type MigrationStatus struct {
	Phase Phase `json:"phase,omitempty"`
	// SourceUID is the pod's; another pod of its name is not touched.
	SourceUID string `json:"sourceUID,omitempty"`
	// From and To are the nodes' names.
	From           string             `json:"from,omitempty"`
	To             string             `json:"to,omitempty"`
	NewPod         string             `json:"newPod,omitempty"`
	StartTime      *metav1.Time       `json:"startTime,omitempty"`
	CompletionTime *metav1.Time       `json:"completionTime,omitempty"`
	Conditions     []metav1.Condition `json:"conditions,omitempty"`
}

// DeepCopyObject is of runtime.Object.
func (m *Migration) DeepCopyObject() runtime.Object { return m.DeepCopy() }

// DeepCopy returns a copy that shares nothing.
func (m *Migration) DeepCopy() *Migration {
	to := *m
	m.ObjectMeta.DeepCopyInto(&to.ObjectMeta)
	to.Spec.NodeSelector = maps.Clone(m.Spec.NodeSelector)
	to.Status.StartTime, to.Status.CompletionTime = m.Status.StartTime.DeepCopy(), m.Status.CompletionTime.DeepCopy()
	to.Status.Conditions = slices.Clone(m.Status.Conditions)
	return &to
}
