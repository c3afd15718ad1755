// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

const (
	// patience is how long a node may be without an agent before its Checkpoints fail: an agent is
	// away for seconds while its DaemonSet is updated, and for a minute while a node starts.
	patience = 2 * time.Minute
	// unscheduled is how long a pod may be without a node before its Checkpoints fail: a cluster that
	// grows has a new node with GPUs in some minutes.
	unscheduled = 10 * time.Minute
	// glance is how often a Checkpoint is looked at that an agent has, and soonest one whose pod has no node.
	glance, soonest = 30 * time.Second, 5 * time.Second
)

// attendance gives Checkpoints to the agents of their nodes, does for them what no node may, and ends
// those that no agent will ever end: their pod has no node, or its node no agent. Until then they say in
// a condition what they wait for. Those that wait for a busy agent are left alone, however long it takes.
type attendance struct {
	cluster

	namespace string // the agents'; empty: any
}

// Reconcile is called for each change of a Checkpoint, and again while it is not over.
func (r *attendance) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var k api.Checkpoint
	if err := r.direct.Get(ctx, request.NamespacedName, &k); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if k.Status.Phase.Over() || k.DeletionTimestamp != nil && k.Status.Phase != api.Running {
		return ctrl.Result{}, r.after(ctx, &k)
	}
	alone, err := r.alone(ctx, &k)
	if err == nil && alone == nil && k.Status.Handover != nil && k.Status.Handover.Sealed == nil {
		alone, err = r.handOver(ctx, &k)
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	if alone == nil {
		before, err := r.before(ctx, &k)
		if err != nil {
			return ctrl.Result{}, err
		}
		return ctrl.Result{RequeueAfter: glance}, r.waits(ctx, &k, before)
	}
	var limit time.Duration // 0 of all others, which no waiting mends
	next := glance
	switch alone.Reason {
	case api.NoAgent:
		limit = patience
	case api.NotScheduled:
		limit, next = unscheduled, soonest
	}
	lasts := limit
	if said := meta.FindStatusCondition(k.Status.Conditions, api.Waiting); said != nil && said.Reason == alone.Reason {
		limit -= r.now().Sub(said.LastTransitionTime.Time)
	}
	if limit > 0 {
		err = r.waits(ctx, &k, api.Fail(alone.Reason, "%w. The Checkpoint fails if that lasts for %s", alone, lasts))
		return ctrl.Result{RequeueAfter: min(limit, next)}, err
	}
	k.End(r.now(), api.Failed, alone.Reason, api.Text(alone.Error()))
	// A conflict is an error: an agent has come meanwhile, and the next round sees what it did.
	if err := r.client.Status().Update(ctx, &k); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	r.events.Event(&k, corev1.EventTypeWarning, alone.Reason, k.WhyFailed())
	var pod corev1.Pod
	if r.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.Pod}, &pod) == nil && pod.UID == k.Status.PodUID && api.Ending(&pod) != "" {
		r.events.Event(&pod, corev1.EventTypeWarning, alone.Reason, fmt.Sprintf("the checkpoint %s before its end: %s", k.Name, k.WhyFailed()))
	}
	return ctrl.Result{}, nil
}

// before returns the Checkpoint of its namespace that one waits for, which its node takes first.
func (r *attendance) before(ctx context.Context, k *api.Checkpoint) (*api.Failure, error) {
	if k.Status.Phase != "" {
		return nil, nil
	}
	var all api.CheckpointList
	if err := r.client.List(ctx, &all, client.InNamespace(k.Namespace)); err != nil {
		return nil, err
	}
	for _, other := range all.Items {
		if other.Status.Phase == api.Running && other.Status.Node == k.Status.Node {
			return api.Fail(api.Queued, "the node %s is at the Checkpoint %s of this namespace", k.Status.Node, other.Name), nil
		}
	}
	return nil, nil
}

// waits has a Checkpoint say what it waits for, nil for nothing more, and tells it in an event. The
// agents change the same status: a conflict is an error, and another round sees what is new.
func (r *attendance) waits(ctx context.Context, k *api.Checkpoint, why *api.Failure) error {
	said := meta.FindStatusCondition(k.Status.Conditions, api.Waiting)
	switch {
	case why == nil && said == nil, why != nil && said != nil && said.Reason == why.Reason && said.Message == why.Error():
		return nil
	case why == nil, said != nil && said.Reason != why.Reason: // for another reason it waits from now on
		meta.RemoveStatusCondition(&k.Status.Conditions, api.Waiting)
	}
	if why != nil {
		meta.SetStatusCondition(&k.Status.Conditions, metav1.Condition{Type: api.Waiting, Status: metav1.ConditionTrue, Reason: why.Reason, Message: why.Error(), ObservedGeneration: k.Generation, LastTransitionTime: metav1.NewTime(r.now())})
	}
	if err := r.client.Status().Update(ctx, k); err != nil {
		return client.IgnoreNotFound(err)
	}
	if why != nil && why.Reason != api.Queued && (said == nil || said.Reason != why.Reason) {
		r.events.Event(k, corev1.EventTypeWarning, why.Reason, why.Error())
	}
	return nil
}

// assign notes the pod of a Checkpoint and its node, whose agent does the rest. Without a node it returns
// why there is none.
func (r *attendance) assign(ctx context.Context, k *api.Checkpoint) (*api.Failure, error) {
	var pod corev1.Pod
	err := r.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.Pod}, &pod)
	switch {
	case apierrors.IsNotFound(err):
		return api.Fail(api.PodNotFound, "there is no pod %s in the namespace %s", k.Spec.Pod, k.Namespace), nil
	case err != nil:
		return nil, err
	case k.Labels[api.EvictedLabel] != "" && k.Labels[api.EvictedLabel] != string(pod.UID): // its tag may be that of the one that has ended
		return api.Fail(api.PodNotFound, "the pod %s that was to be checkpointed before its end is gone, and another one has its name", k.Spec.Pod), nil
	case pod.Spec.NodeName == "":
		return api.Fail(api.NotScheduled, "the pod %s is on no node yet: %s; make a Checkpoint of it when it runs", k.Spec.Pod, whyPending(&pod)), nil
	}
	k.Status.Node, k.Status.PodUID, k.Status.Template = pod.Spec.NodeName, pod.UID, template(&pod)
	return nil, r.client.Status().Update(ctx, k)
}

// handOver seals what a Checkpoint is pushed with for the agent that does it.
func (r *attendance) handOver(ctx context.Context, k *api.Checkpoint) (*api.Failure, error) {
	auths, err := r.auths(ctx, k)
	if f, ok := errors.AsType[*api.Failure](err); ok {
		return f, nil
	}
	if err != nil {
		return nil, err
	}
	config, err := json.Marshal(map[string]any{"auths": auths})
	if err == nil {
		err = k.Status.Handover.Seal(string(k.UID), config)
	}
	if err != nil {
		return nil, err
	}
	return nil, r.client.Status().Update(ctx, k)
}

// after deletes the pod of a Checkpoint that has succeeded, where that is asked for. One that is deleted may take
// its image with it.
func (r *attendance) after(ctx context.Context, k *api.Checkpoint) error {
	if k.Status.Phase != api.Succeeded || k.DeletionTimestamp != nil || k.Spec.LeaveRunning == nil || *k.Spec.LeaveRunning {
		return nil
	}
	var pod corev1.Pod
	err := r.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.Pod}, &pod)
	if err != nil || pod.UID != k.Status.PodUID {
		return client.IgnoreNotFound(err)
	}
	return client.IgnoreNotFound(r.client.Delete(ctx, &pod, client.Preconditions{UID: &pod.UID}))
}

// alone returns why no agent works for a Checkpoint; nil if one does, or may yet.
func (r *attendance) alone(ctx context.Context, k *api.Checkpoint) (*api.Failure, error) {
	if k.Status.Node == "" {
		if why, err := r.assign(ctx, k); why != nil || err != nil {
			return why, err
		}
	}
	node := k.Status.Node
	var agents corev1.PodList
	if err := r.client.List(ctx, &agents, client.InNamespace(r.namespace), client.MatchingLabels{api.NameLabel: api.AgentName}); err != nil {
		return nil, err
	}
	state := "it has no pod there"
	for _, a := range agents.Items {
		if a.Spec.NodeName != node {
			continue
		}
		if is(&a, corev1.PodReady) { // one that is replaced works on while a hook waits
			return nil, nil
		}
		state = fmt.Sprintf("its pod %s there is not ready", a.Name)
	}
	doing := "no agent works on the node %s of the pod %s"
	if k.Status.Phase == api.Running {
		doing = "the agent of the node %s has left the checkpoint of the pod %s unfinished"
	}
	return api.Fail(api.NoAgent, doing+": see why the DaemonSet %s in the namespace %s does not serve that node (%s; by default it runs on nodes with the label nvidia.com/gpu.present=true), then make another Checkpoint",
		node, k.Spec.Pod, api.AgentName, cmp.Or(r.namespace, "of your installation"), state), nil
}

// is reports whether a pod has a condition.
func is(pod *corev1.Pod, condition corev1.PodConditionType) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == condition && c.Status == corev1.ConditionTrue })
}

// whyPending returns what the scheduler says of a pod without a node.
func whyPending(pod *corev1.Pod) string {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue && c.Message != "" {
			return c.Message
		}
	}
	if len(pod.Spec.SchedulingGates) > 0 {
		return "it has the scheduling gate " + pod.Spec.SchedulingGates[0].Name
	}
	return "no scheduler has said why"
}
