// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

const (
	// patience is how long a node may be without an agent before its Checkpoints fail: an agent is
	// away for seconds while its DaemonSet is updated, and for a minute while a node starts.
	patience = 2 * time.Minute
	// glance is how often a Checkpoint is looked at that an agent has.
	glance = 30 * time.Second
)

// attendance ends Checkpoints that no agent will ever end: their pod's node has none. Those that
// wait for a busy agent are left alone, however long it takes.
type attendance struct {
	cluster

	namespace string // the agents'; empty: any

	mu    sync.Mutex
	since map[types.UID]time.Time // when a Checkpoint was first seen to be alone
}

// Reconcile is called for each change of a Checkpoint, and again while it is not over.
func (r *attendance) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var k api.Checkpoint
	if err := r.direct.Get(ctx, request.NamespacedName, &k); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if k.Status.Phase.Over() || k.DeletionTimestamp != nil {
		r.attended(&k)
		return ctrl.Result{}, nil
	}
	alone, err := r.alone(ctx, &k)
	if err != nil {
		return ctrl.Result{}, err
	}
	if alone == nil {
		r.attended(&k)
		return ctrl.Result{RequeueAfter: glance}, nil
	}
	waited, first := r.waited(&k)
	if left := patience - waited; left > 0 {
		if first && alone.reason == api.NoAgent {
			r.events.Event(&k, corev1.EventTypeWarning, alone.reason, fmt.Sprintf("%v; the Checkpoint fails if there is none in %s", alone, patience))
		}
		return ctrl.Result{RequeueAfter: min(left, glance)}, nil
	}
	now := metav1.NewTime(r.now())
	k.Status.Phase, k.Status.Completed = api.Failed, &now
	meta.SetStatusCondition(&k.Status.Conditions, metav1.Condition{Type: api.HasFailed, Status: metav1.ConditionTrue, Reason: alone.reason, Message: alone.Error(), ObservedGeneration: k.Generation})
	// A conflict is an error: an agent has come meanwhile, and the next round sees what it did.
	if err := r.client.Status().Update(ctx, &k); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	r.attended(&k)
	r.events.Event(&k, corev1.EventTypeWarning, alone.reason, alone.Error())
	return ctrl.Result{}, nil
}

// alone returns why no agent works for a Checkpoint; nil if one does, or may yet.
func (r *attendance) alone(ctx context.Context, k *api.Checkpoint) (*failure, error) {
	node := k.Status.Node
	if k.Status.Phase == "" {
		var pod corev1.Pod
		err := r.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.Pod}, &pod)
		switch {
		case apierrors.IsNotFound(err): // which the agents say, if there are any
			return &failure{"PodNotFound", fmt.Errorf("there is no pod %s in the namespace %s", k.Spec.Pod, k.Namespace)}, nil
		case err != nil:
			return nil, err
		case pod.Spec.NodeName == "":
			return nil, nil
		}
		node = pod.Spec.NodeName
	}
	var agents corev1.PodList
	if err := r.client.List(ctx, &agents, client.InNamespace(r.namespace), client.MatchingLabels{api.NameLabel: api.AgentName}); err != nil {
		return nil, err
	}
	state := "it has no pod there"
	for _, a := range agents.Items {
		if a.Spec.NodeName != node || a.DeletionTimestamp != nil {
			continue
		}
		if ready(&a) {
			return nil, nil
		}
		state = fmt.Sprintf("its pod %s there is not ready", a.Name)
	}
	doing := "no agent works on the node %s of the pod %s"
	if k.Status.Phase == api.Running {
		doing = "the agent of the node %s has left the checkpoint of the pod %s unfinished"
	}
	return &failure{api.NoAgent, fmt.Errorf(doing+": see why the DaemonSet %s in the namespace %s does not serve that node (%s; by default it runs on nodes with the label nvidia.com/gpu.present=true), then make another Checkpoint",
		node, k.Spec.Pod, api.AgentName, cmp.Or(r.namespace, "of your installation"), state)}, nil
}

// ready reports whether a pod is ready.
func ready(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// waited returns for how long a Checkpoint has been alone, and whether it was not before.
func (r *attendance) waited(k *api.Checkpoint) (_ time.Duration, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	since, ok := r.since[k.UID]
	if !ok {
		since = r.now()
		r.since[k.UID] = since
	}
	return r.now().Sub(since), !ok
}

func (r *attendance) attended(k *api.Checkpoint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.since, k.UID)
}
