// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package api has the custom resources by which a cluster's users ask for checkpoints, and what else
// users and the programs of a cluster have to call alike.
//
// The life of a Checkpoint: its user makes it, the controller notes the pod and its node, that node's
// agent sets the phase Running, checkpoints and pushes the containers, and sets Succeeded or Failed.
// Neither is left again: another try is another object. When the agent ends in between, the next one
// pushes what was taken, or begins again. What the agent pushes with, the controller
// hands over (Handover). One that no agent can begin says so in the condition Waiting, and fails after
// a while.
package api

import (
	"bytes"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// Checkpoint asks for the checkpoint of a pod, once.
type Checkpoint struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitzero"`

	Spec   Spec   `json:"spec"`
	Status Status `json:"status,omitzero"`
}

// Spec is what is asked for.
type Spec struct {
	// Pod is the name of a pod in the object's namespace.
	Pod string `json:"pod"`
	// Container is one of the pod's; empty: all that run, in one cut.
	Container string `json:"container,omitempty"`
	// Repository is where the image goes, such as registry.example.com/team/job. Its tag is Tag, or
	// the object's name, with "-" and the container's name where there are several.
	Repository string `json:"repository"`
	// Tag is one that moves from checkpoint to checkpoint; empty: the object's name.
	Tag string `json:"tag,omitempty"`
	// PushSecret is a secret of the type kubernetes.io/dockerconfigjson; empty: none is needed.
	PushSecret string `json:"pushSecret,omitempty"`
	// LeaveRunning leaves the pod running; otherwise it is deleted when all is pushed. Nil is true.
	LeaveRunning *bool `json:"leaveRunning,omitempty"`
	// TimeoutSeconds bounds the checkpoint, until its images are complete; 0: an hour.
	TimeoutSeconds int64 `json:"timeoutSeconds,omitempty"`
}

// Phase is how far a Checkpoint is.
type Phase string

// The phases. An object without one waits.
const (
	Running   Phase = "Running"
	Succeeded Phase = "Succeeded"
	Failed    Phase = "Failed"
)

// Over reports whether the phase is not left again.
func (p Phase) Over() bool { return p == Succeeded || p == Failed }

// The types of conditions, as a Job has them: each is there and true, or not there.
const (
	Complete  = "Complete"
	HasFailed = "Failed"
	// Waiting is there while one waits for what may never come. Of a Checkpoint NoAgent and NotScheduled are
	// its reasons, and those of Failed when it has waited in vain. Queued waits for another one.
	Waiting = "Waiting"
)

// The stages.
const (
	Checkpointing = "Checkpointing"
	Pushing       = "Pushing"
)

// Status is what came of it.
type Status struct {
	Phase Phase `json:"phase,omitempty"`
	// Stage is what is being done, while the phase is Running: Checkpointing or Pushing.
	Stage string `json:"stage,omitempty"`
	// Percent is how much of what is made is in the registry, while the stage is Pushing.
	Percent int32 `json:"percent,omitempty"`
	// Node is the pod's node, and PodUID the pod: another one of its name is not touched. The controller
	// writes both, and no agent may change them.
	Node   string    `json:"node,omitempty"`
	PodUID types.UID `json:"podUID,omitempty"`
	// Template is a digest of the template that the pod was made of, if it came with the gate. The
	// controller writes it, and no agent may change it.
	Template string `json:"template,omitempty"`
	// Restarts is how often the agent was restarted meanwhile.
	Restarts       int32              `json:"restarts,omitempty"`
	StartTime      *metav1.Time       `json:"startTime,omitempty"`
	CompletionTime *metav1.Time       `json:"completionTime,omitempty"`
	Handover       *Handover          `json:"handover,omitempty"`   // while there is one
	Bytes          int64              `json:"bytes,omitempty"`      // of all containers, as far as they are checkpointed
	Containers     []Container        `json:"containers,omitempty"` // the pushed ones
	Conditions     []metav1.Condition `json:"conditions,omitempty"`
}

// Container is the checkpoint of one container.
type Container struct {
	Name string `json:"name"`
	// Image is the image's name, with its tag; Digest that of its manifest.
	Image  string `json:"image"`
	Digest string `json:"digest"`
	// Bytes are those of the layers that the checkpoint has beside its base's, GPUBytes its GPU
	// state, Pushed what the registry lacked.
	Bytes    int64 `json:"bytes"`
	GPUBytes int64 `json:"gpuBytes"`
	Pushed   int64 `json:"pushed"`
	// How long each part took. The pod is paused for less than Checkpoint.
	Checkpoint metav1.Duration `json:"checkpoint"`
	Build      metav1.Duration `json:"build"`
	Push       metav1.Duration `json:"push"`
}

// End has a Checkpoint be over, and say what came of it. The reason is one of Failed or Complete.
func (c *Checkpoint) End(at time.Time, phase Phase, reason, message string) {
	kind := Complete
	if phase == Failed {
		kind = HasFailed
	}
	c.Status.Phase, c.Status.Stage, c.Status.Percent, c.Status.CompletionTime, c.Status.Handover = phase, "", 0, new(metav1.NewTime(at)), nil
	meta.RemoveStatusCondition(&c.Status.Conditions, Waiting)
	meta.SetStatusCondition(&c.Status.Conditions, metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: reason, Message: message, ObservedGeneration: c.Generation})
}

// WhyFailed returns what a Checkpoint that has failed says of it.
func (c *Checkpoint) WhyFailed() string {
	if f := meta.FindStatusCondition(c.Status.Conditions, HasFailed); f != nil {
		return f.Message
	}
	return "it does not say why"
}

// DeepCopyObject is of runtime.Object.
func (c *Checkpoint) DeepCopyObject() runtime.Object { return c.DeepCopy() }

// DeepCopy returns a copy that shares nothing.
func (c *Checkpoint) DeepCopy() *Checkpoint {
	to := *c
	c.ObjectMeta.DeepCopyInto(&to.ObjectMeta)
	to.Labels, to.Annotations = maps.Clone(c.Labels), maps.Clone(c.Annotations)
	if c.Spec.LeaveRunning != nil {
		to.Spec.LeaveRunning = new(*c.Spec.LeaveRunning)
	}
	to.Status.StartTime, to.Status.CompletionTime = c.Status.StartTime.DeepCopy(), c.Status.CompletionTime.DeepCopy()
	if h := c.Status.Handover; h != nil {
		to.Status.Handover = &Handover{bytes.Clone(h.Key), bytes.Clone(h.Sealed)}
	}
	to.Status.Containers = slices.Clone(c.Status.Containers)
	to.Status.Conditions = slices.Clone(c.Status.Conditions)
	return &to
}
