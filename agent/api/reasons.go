// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

// Reasons of events, of pods and of the objects, and of conditions.
const (
	// Pushed says that all images of a Checkpoint are in the registry.
	Pushed = "Pushed"
	// Migrated says that the new pod is ready and the old one gone.
	Migrated = "Migrated"
	// NoAgent says that no agent is ready on the pod's node.
	NoAgent = "NoAgent"
	// NotScheduled says that the pod is on no node yet.
	NotScheduled = "PodNotScheduled"
	// Queued says that another Checkpoint of the namespace and node, or another Migration of the pod, comes first.
	Queued = "Queued"
	// PodNotFound says that there is no such pod, or another one of its name by now.
	PodNotFound = "PodNotFound"
	// NotRunning says that the pod or its container does not run.
	NotRunning = "NotRunning"
	// CheckpointFailed says that a container, or the Checkpoint of a Migration, could not be checkpointed.
	CheckpointFailed = "CheckpointFailed"
	// PushFailed says that an image is not in the registry.
	PushFailed = "PushFailed"
	// NoCredentials says that the controller has not handed over the push secret.
	NoCredentials = "NoCredentials"
	// NoSecret says that the push secret is not there, or cannot be read as one for registries.
	NoSecret = "NoSecret"
	// NoRepository says that the name of the repository is invalid.
	NoRepository = "NoRepository"
	// Interrupted says that the Checkpoint was deleted, or its agent restarted too often.
	Interrupted = "Interrupted"
	// OtherCause says that a Checkpoint failed for a cause that has no other reason here.
	OtherCause = "Failed"
	// Owned says that a controller owns the pod, and would replace it.
	Owned = "Owned"
	// SameNode says that the pod runs on the node where it is to go.
	SameNode = "SameNode"
	// NameTaken says that another object has the name of the new pod or of the Checkpoint.
	NameTaken = "NameTaken"
	// AlreadyMigrating says that another Migration has a checkpoint of the pod that ends.
	AlreadyMigrating = "AlreadyMigrating"
	// NewPodRefused says that the API server does not take the new pod, as for a quota.
	NewPodRefused = "NewPodRefused"
	// NewPodDeleted says that somebody deleted the new pod.
	NewPodDeleted = "NewPodDeleted"
	// OldPodRefused says that the API server does not delete the old pod.
	OldPodRefused = "OldPodRefused"
	// OldPodTerminating says that the old pod does not end, as on a node that is down.
	OldPodTerminating = "OldPodTerminating"
	// CheckpointBegins says that a Checkpoint of a pod is made: it ends, or is the first of its template that is ready.
	CheckpointBegins = "CheckpointBegins"
	// CheckpointRefused says that the API server does not take the Checkpoint, as of a repository that is not allowed.
	CheckpointRefused = "CheckpointRefused"
	// Continues says that a replica gets the images of its template's Checkpoint.
	Continues = "Continues"
	// StartsCold says that a replica has its own images, not those of a checkpoint.
	StartsCold = "StartsCold"
	// ImageKept says that the image of a deleted Checkpoint stays in the registry, which does not delete it.
	ImageKept = "ImageKept"
	// ContainerCheckpointed says that a container was checkpointed.
	ContainerCheckpointed = "Checkpointed"
	// ContainerRestored says that a container was restored.
	ContainerRestored = "Restored"
	// Suspended says that a container is off its GPUs.
	Suspended = "Suspended"
	// Resumed says that a container is back on them.
	Resumed = "Resumed"
	// StartedAfresh says that a container starts from the beginning since it cannot be restored.
	StartedAfresh = "StartedAfresh"
	// RestoreFailed says that a container, or the new pod of a Migration, could not be restored.
	RestoreFailed = "RestoreFailed"
	// SuspendFailed says that a container could not be suspended.
	SuspendFailed = "SuspendFailed"
	// ResumeFailed says that a container could not be resumed.
	ResumeFailed = "ResumeFailed"
	// LivenessProbe says that a suspended container has a probe that the kubelet restarts it for.
	LivenessProbe = "LivenessProbe"
)
