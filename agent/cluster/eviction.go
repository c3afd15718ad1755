// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"math"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// endings makes the Checkpoint or the Migration of a pod that ends. The pod waits for it in its
// preStop hook, which asks the agent of its node.
type endings struct{ cluster }

// Reconcile is called for each change of a pod that has one of the annotations.
func (r *endings) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var pod corev1.Pod
	if err := r.client.Get(ctx, request.NamespacedName, &pod); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	what := api.Ending(&pod)
	if what == "" || pod.Spec.NodeName == "" || pod.Annotations[api.Refused] != "" {
		return ctrl.Result{}, nil
	}
	made := metav1.ObjectMeta{
		Namespace: pod.Namespace, Name: api.EvictionName(pod.Name, string(pod.UID)),
		Labels: map[string]string{api.EvictedLabel: string(pod.UID)},
	}
	repository, secret := pod.Annotations[api.Repository], pod.Annotations[api.PushSecret]
	var object client.Object = &api.Checkpoint{ObjectMeta: made, Spec: api.Spec{
		Pod: pod.Name, Repository: repository, Tag: pod.Annotations[api.Tag], PushSecret: secret, TimeoutSeconds: r.left(&pod),
	}}
	if what == api.DoMigrate && metav1.GetControllerOf(&pod) == nil {
		object = &api.Migration{ObjectMeta: made, Spec: api.MigrationSpec{
			Pod: pod.Name, Repository: repository, PushSecret: secret, TimeoutSeconds: r.left(&pod),
		}}
	}
	err := r.client.Create(ctx, object)
	switch {
	case apierrors.IsAlreadyExists(err):
		return ctrl.Result{}, nil
	case apierrors.IsInvalid(err), apierrors.IsForbidden(err): // no repository, or none that is one
		why := api.Text(fmt.Sprintf("it ends without a checkpoint: %v", err))
		r.events.Event(&pod, corev1.EventTypeWarning, api.CheckpointRefused, why)
		return ctrl.Result{}, r.refuse(ctx, &pod, why)
	case err != nil:
		return ctrl.Result{}, err
	}
	kind, message := corev1.EventTypeNormal, "it ends, and is checkpointed before: "+made.Name
	for _, c := range pod.Spec.Containers { // of a hook with another path the kubelet says nothing, whatever it is answered
		if !strings.HasPrefix(api.HookOf(&c)+"/", api.HookPath+pod.Namespace+"/") {
			kind, message = corev1.EventTypeWarning, message+fmt.Sprintf("; container %s does not wait for that: it has no preStop hook with the path %s%s", c.Name, api.HookPath, pod.Namespace)
		}
	}
	r.events.Event(&pod, kind, api.CheckpointBegins, message)
	return ctrl.Result{}, nil
}

// left is how many seconds the pod has left, at least 1.
func (r *endings) left(pod *corev1.Pod) int64 {
	return min(max(int64(math.Ceil(pod.DeletionTimestamp.Sub(r.now()).Seconds())), 1), 3600)
}
