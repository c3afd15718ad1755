// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Annotations of a pod that is to be checkpointed before it ends.
const (
	// OnEviction has the pod checkpointed when it is evicted, preempted or its node is drained. Its
	// value is DoCheckpoint or DoMigrate.
	OnEviction = "gpuckpt.dev/on-eviction"
	// OnDeletion has the pod checkpointed when it is deleted otherwise. Its value is DoCheckpoint.
	OnDeletion = "gpuckpt.dev/on-deletion"
	// Repository, Tag and PushSecret are the fields of the Checkpoint.
	Repository = "gpuckpt.dev/repository"
	Tag        = "gpuckpt.dev/tag"
	PushSecret = "gpuckpt.dev/push-secret" //nolint:gosec // the name of an annotation

	DoCheckpoint = "checkpoint"
	DoMigrate    = "migrate" // and restored on another node
)

// Labels and annotations of what the controller makes.
const (
	// EvictedLabel has the UID of the pod that a Checkpoint or Migration was made for, at its end. It is
	// for people: whoever makes an object may write it, so little is done for its sake: another pod is refused.
	EvictedLabel = "gpuckpt.dev/evicted"
	// ScheduleLabel has the name of the schedule that made a Checkpoint.
	ScheduleLabel = "gpuckpt.dev/schedule"
	// MigrationAnnotation of a pod is the UID of the Migration that made it.
	MigrationAnnotation = "gpuckpt.dev/migration"
	// AfterAnnotation of a pod with the gate is the UID and name of the pod that it goes on for when that is gone.
	AfterAnnotation = "gpuckpt.dev/after"
	// RestoreAnnotation of a pod has the runtime continue its checkpoint image.
	RestoreAnnotation = "dev.gpuckpt.restore"
	// Gate keeps a pod from being scheduled until its images are known: a Migration's, and the replicas of a
	// template that has it.
	Gate = "gpuckpt.dev/checkpoint"
	// ImagesAnnotation of a replica has the images that its template has, by the names of the containers.
	ImagesAnnotation = "gpuckpt.dev/images"
	// Refused of a pod that ends says why it ends without a checkpoint, though it has the annotations for one.
	Refused = "gpuckpt.dev/refused"
	// TemplateLabel of a Checkpoint has the name of what owns the replicas that it was made for.
	TemplateLabel = "gpuckpt.dev/template"
	// ImageFinalizer of a Checkpoint has its images deleted in the registry before it goes.
	ImageFinalizer = "gpuckpt.dev/image"
)

// NameLabel is the label by which the agents' pods are found, and AgentName what they have there, as
// their DaemonSet has.
const (
	NameLabel = "app.kubernetes.io/name"
	AgentName = "gpuckpt-agent"
)

// HookPath begins the paths of the preStop hooks that agents answer. The pod's namespace follows.
const HookPath = "/checkpoint/"

// HookOf returns the path that a container's preStop hook asks for by HTTP, "" for none.
func HookOf(c *corev1.Container) string {
	if l := c.Lifecycle; l != nil && l.PreStop != nil && l.PreStop.HTTPGet != nil {
		return l.PreStop.HTTPGet.Path
	}
	return ""
}

// EvictionName is the name of the Checkpoint or Migration that is made for a pod at its end.
func EvictionName(pod, uid string) string { return Short(pod) + "-" + uid[:min(len(uid), 8)] }

// Short cuts a name, so that more may follow it in a tag, a label or the name of a pod.
func Short(name string) string {
	const most = 50
	return strings.TrimRight(name[:min(len(name), most)], "-.")
}

// Ending returns what is to be done for a pod that ends and says so in its annotations: nothing, or
// DoCheckpoint or DoMigrate. One that is only to be evicted may run on for long, and be checkpointed too early.
func Ending(p *corev1.Pod) string {
	if p.DeletionTimestamp == nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return ""
	}
	for _, c := range p.Status.Conditions {
		// The API server and the scheduler set it before they end a pod, the kubelet when it has.
		if c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue && p.Annotations[OnEviction] != "" {
			return p.Annotations[OnEviction]
		}
	}
	return p.Annotations[OnDeletion]
}
