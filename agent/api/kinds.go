// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group of the resources.
var GroupVersion = schema.GroupVersion{Group: "gpuckpt.dev", Version: "v1alpha1"}

// AddTo makes the types known.
func AddTo(s *runtime.Scheme) error {
	for kind, o := range map[string]runtime.Object{
		"Checkpoint": &Checkpoint{}, "CheckpointList": &CheckpointList{}, "Migration": &Migration{}, "MigrationList": &MigrationList{},
		"CheckpointSchedule": &CheckpointSchedule{}, "CheckpointScheduleList": &CheckpointScheduleList{}, "NodeKey": &NodeKey{}, "NodeKeyList": &NodeKeyList{},
	} {
		s.AddKnownTypeWithName(GroupVersion.WithKind(kind), o)
	}
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

type (
	// CheckpointList is a list of Checkpoints.
	CheckpointList = list[Checkpoint, *Checkpoint]
	// MigrationList is a list of Migrations.
	MigrationList = list[Migration, *Migration]
	// CheckpointScheduleList is a list of CheckpointSchedules.
	CheckpointScheduleList = list[CheckpointSchedule, *CheckpointSchedule]
	// NodeKeyList is a list of NodeKeys.
	NodeKeyList = list[NodeKey, *NodeKey]
)

type list[T any, P interface {
	*T
	DeepCopy() P
}] struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`

	Items []T `json:"items"`
}

// DeepCopyObject is of runtime.Object.
func (l *list[T, P]) DeepCopyObject() runtime.Object {
	to := *l
	l.ListMeta.DeepCopyInto(&to.ListMeta)
	to.Items = make([]T, len(l.Items))
	for i := range l.Items {
		to.Items[i] = *P(&l.Items[i]).DeepCopy()
	}
	return &to
}
