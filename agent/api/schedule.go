// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// CheckpointSchedule asks for Checkpoints of pods again and again, and keeps the newest.
type CheckpointSchedule struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	Spec   ScheduleSpec   `json:"spec"`
	Status ScheduleStatus `json:"status,omitzero"`
}

// ScheduleSpec is what is asked for.
type ScheduleSpec struct {
	// Schedule is cron's five fields in UTC, or "@hourly", "@every 10m" and the like.
	Schedule string `json:"schedule"`
	// Selector chooses pods of the namespace. Of each that runs there is a Checkpoint at each time,
	// unless the one before is not over.
	Selector *metav1.LabelSelector `json:"selector"`
	// Checkpoint is the spec of each, less the pod.
	Checkpoint Template `json:"checkpoint"`
	// Keep is how many of each pod are kept that succeeded, and how many that failed; 0: 3.
	Keep int `json:"keep,omitempty"`
	// KeepImages leaves the images of deleted Checkpoints in the registry.
	KeepImages bool `json:"keepImages,omitempty"`
	// Suspend makes no more.
	Suspend bool `json:"suspend,omitempty"`
}

// Template is of a Checkpoint's spec what does not depend on the pod.
type Template struct {
	Container      string `json:"container,omitempty"`
	Repository     string `json:"repository"`
	PushSecret     string `json:"pushSecret,omitempty"`
	TimeoutSeconds int64  `json:"timeoutSeconds,omitempty"`
}

// ScheduleStatus is what came of it.
type ScheduleStatus struct {
	// Last and Next are times of the schedule.
	Last       *metav1.Time       `json:"last,omitempty"`
	Next       *metav1.Time       `json:"next,omitempty"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// DeepCopyObject is of runtime.Object.
func (s *CheckpointSchedule) DeepCopyObject() runtime.Object { return s.DeepCopy() }

// DeepCopy returns a copy that shares nothing.
func (s *CheckpointSchedule) DeepCopy() *CheckpointSchedule {
	to := *s
	s.ObjectMeta.DeepCopyInto(&to.ObjectMeta)
	to.Spec.Selector = s.Spec.Selector.DeepCopy()
	to.Status.Last, to.Status.Next = s.Status.Last.DeepCopy(), s.Status.Next.DeepCopy()
	to.Status.Conditions = append([]metav1.Condition(nil), s.Status.Conditions...)
	return &to
}
