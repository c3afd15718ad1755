// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
	"github.com/gpuckpt/gpuckpt/agent/node"
)

// unscheduled is how long a pod without a node is left alone.
const unscheduled = 5 * time.Second

// patience is how an API server is asked again that does not answer. After three minutes it is over.
var patience = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 1.5, Steps: 18}

// patiently asks the API server, and asks again if it was not there or could not answer. The error is the last.
func patiently(ctx context.Context, ask func() error) (err error) {
	_ = wait.ExponentialBackoffWithContext(ctx, patience, func(context.Context) (over bool, _ error) { // its error says only that time is over
		err = ask()
		return !api.Passes(err), nil
	})
	return err
}

// worker does the work on the node; a test has its own.
type worker interface {
	Checkpoint(ctx context.Context, namespace, pod, container string, seconds int64) (archive string, err error)
	CheckpointPod(ctx context.Context, namespace, pod, image string, seconds int64) ([]node.Captured, error)
	Discard(ctx context.Context, image string) error
	Recover(ctx context.Context) error
	Build(ctx context.Context, archive, image string) (node.Built, error)
	Push(ctx context.Context, image string, credentials []byte) (sent int64, err error)
}

// controller takes the Checkpoints of pods of its node from their making to their end.
type controller struct {
	client client.Client
	// direct reads pods and secrets one by one: the agent may list neither.
	direct client.Reader
	events record.EventRecorder
	node   string // its name
	work   worker
	now    func() time.Time
}

// failure is an error with a reason for the condition.
type failure struct {
	reason string
	err    error
}

func (f failure) Error() string { return f.err.Error() }
func (f failure) Unwrap() error { return f.err }

// Reconcile is called for each change of a Checkpoint, never twice at once for one.
func (c *controller) Reconcile(ctx context.Context, r ctrl.Request) (ctrl.Result, error) {
	var k api.Checkpoint
	if err := c.client.Get(ctx, r.NamespacedName, &k); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if k.Status.Phase.Over() || k.DeletionTimestamp != nil {
		return ctrl.Result{}, nil
	}
	if k.Status.Phase == api.Running {
		if k.Status.Node != c.node {
			return ctrl.Result{}, nil
		}
		// What the agent has seen may be older than what it has done.
		if err := c.direct.Get(ctx, r.NamespacedName, &k); err != nil || k.Status.Phase.Over() {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
		// This agent does one after the other: another one has begun it and is gone.
		return ctrl.Result{}, c.end(ctx, &k, failure{api.Interrupted, errors.Join(errors.New("the node's agent was restarted meanwhile; the pod runs on"), c.work.Recover(ctx))})
	}
	var pod corev1.Pod
	err := c.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.Pod}, &pod)
	switch {
	case apierrors.IsNotFound(err): // each node's agent says so, the first is heard
		return ctrl.Result{}, c.end(ctx, &k, failure{"PodNotFound", fmt.Errorf("there is no pod %s in the namespace %s", k.Spec.Pod, k.Namespace)})
	case err != nil:
		return ctrl.Result{}, err
	case pod.Spec.NodeName == "":
		return ctrl.Result{RequeueAfter: unscheduled}, nil
	case pod.Spec.NodeName != c.node:
		return ctrl.Result{}, nil
	}
	began := metav1.NewTime(c.now())
	k.Status = api.Status{Phase: api.Running, Node: c.node, Started: &began}
	if err := c.client.Status().Update(ctx, &k); err != nil { // a conflict: it comes again
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, c.end(ctx, &k, c.checkpoint(ctx, &k, &pod))
}

// checkpoint checkpoints and pushes the pod's containers: several in one cut.
func (c *controller) checkpoint(ctx context.Context, k *api.Checkpoint, pod *corev1.Pod) error {
	var names []string
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) { // sidecars are among the first
		if s.State.Running != nil && (k.Spec.Container == "" || k.Spec.Container == s.Name) {
			names = append(names, s.Name)
		}
	}
	if len(names) == 0 {
		return failure{"NotRunning", fmt.Errorf("no such container of the pod %s runs", pod.Name)}
	}
	credentials, err := c.credentials(ctx, k)
	if err != nil {
		return err
	}
	if len(names) > 1 {
		if err := c.pod(ctx, k, k.Spec.Repository+":"+cmp.Or(k.Spec.Tag, k.Name), names, credentials); err != nil {
			return err
		}
		names = nil
	}
	for _, name := range names {
		image := k.Spec.Repository + ":" + cmp.Or(k.Spec.Tag, k.Name)
		if len(pod.Spec.Containers) > 1 {
			image += "-" + name
		}
		done, err := c.container(ctx, k, name, image, credentials)
		if err != nil {
			return fmt.Errorf("container %s: %w", name, err)
		}
		k.Status.Containers = append(k.Status.Containers, done)
	}
	if k.Spec.LeaveRunning == nil || *k.Spec.LeaveRunning {
		return nil
	}
	uid := pod.UID
	err = patiently(ctx, func() error {
		return client.IgnoreNotFound(c.client.Delete(ctx, pod, client.Preconditions{UID: &uid}))
	})
	if err != nil {
		return failure{"DeleteFailed", fmt.Errorf("it is pushed, and the pod is not deleted: %w", err)}
	}
	return nil
}

// credentials returns the docker config.json to push with.
func (c *controller) credentials(ctx context.Context, k *api.Checkpoint) ([]byte, error) {
	if k.Spec.PushSecret == "" {
		return []byte("{}"), nil
	}
	var secret corev1.Secret
	err := patiently(ctx, func() error {
		return c.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.PushSecret}, &secret)
	})
	if err != nil {
		return nil, failure{"NoSecret", fmt.Errorf("read the push secret: %w", err)}
	}
	data, ok := secret.Data[corev1.DockerConfigJsonKey]
	if !ok {
		return nil, failure{"NoSecret", fmt.Errorf("the push secret %s has the type %s: it must be %s", secret.Name, secret.Type, corev1.SecretTypeDockerConfigJson)}
	}
	return data, nil
}

// container takes one container from the checkpoint to the registry.
func (c *controller) container(ctx context.Context, k *api.Checkpoint, name, image string, credentials []byte) (done api.Container, err error) {
	done = api.Container{Name: name, Image: image}
	began := c.now()
	lap := func() metav1.Duration {
		took := c.now().Sub(began)
		began = began.Add(took)
		return metav1.Duration{Duration: took.Round(time.Millisecond)}
	}
	archive, err := c.work.Checkpoint(ctx, k.Namespace, k.Spec.Pod, name, k.Spec.TimeoutSeconds)
	if err != nil {
		return done, failure{"CheckpointFailed", err}
	}
	done.Checkpoint = lap()
	built, err := c.work.Build(ctx, archive, image)
	if err != nil {
		return done, failure{"BuildFailed", err}
	}
	done.Build = lap()
	done.Digest, done.Bytes, done.GPUBytes = built.Digest, built.Bytes, built.GPUBytes
	if done.Pushed, err = c.push(ctx, k, image, credentials); err != nil {
		return done, failure{"PushFailed", err}
	}
	done.Push = lap()
	return done, nil
}

// ends reports whether a Checkpoint is of a pod that ends, and was made for that.
func ends(k *api.Checkpoint) bool { return k.Labels[api.EvictedLabel] != "" }

// push sends an image to the registry, and takes it from the node. If the pod ends, and the image cannot
// be sent, it is all that is left of the pod: it stays on the node, and the error says where.
func (c *controller) push(ctx context.Context, k *api.Checkpoint, image string, credentials []byte) (sent int64, err error) {
	sent, err = c.work.Push(ctx, image, credentials)
	if err != nil && ends(k) {
		return 0, fmt.Errorf("%w; the pod ends, so its image stays on the node %s: there, gpuckpt image push --namespace k8s.io %s sends it", err, c.node, image)
	}
	return sent, errors.Join(err, c.work.Discard(context.WithoutCancel(ctx), image))
}

// write writes the status of a Checkpoint. over says that somebody has said before what came of it.
func (c *controller) write(ctx context.Context, k *api.Checkpoint) (over bool, err error) {
	status := k.Status
	err = patiently(ctx, func() error {
		err := c.client.Status().Update(ctx, k)
		for ; apierrors.IsConflict(err); err = c.client.Status().Update(ctx, k) { // somebody has put a label to it, or it is over
			if err := c.direct.Get(ctx, client.ObjectKeyFromObject(k), k); err != nil || k.Status.Phase.Over() {
				over = err == nil
				return err
			}
			k.Status = status
		}
		return err
	})
	return over, err
}

// end says what came of a Checkpoint: in its status, and as an event of it.
func (c *controller) end(ctx context.Context, k *api.Checkpoint, err error) error {
	ctx = context.WithoutCancel(ctx) // an agent that ends says so
	now := metav1.NewTime(c.now())
	condition := metav1.Condition{Type: api.Complete, Status: metav1.ConditionTrue, Reason: "Pushed", Message: "all is in the registry", ObservedGeneration: k.Generation}
	k.Status.Phase, k.Status.Completed, k.Status.Node = api.Succeeded, &now, c.node
	kind := corev1.EventTypeNormal
	if err != nil {
		kind, k.Status.Phase = corev1.EventTypeWarning, api.Failed
		condition.Type, condition.Reason, condition.Message = api.HasFailed, "Failed", err.Error()
		if f, ok := errors.AsType[failure](err); ok {
			condition.Reason = f.reason
		}
	}
	meta.RemoveStatusCondition(&k.Status.Conditions, api.Waiting)
	meta.SetStatusCondition(&k.Status.Conditions, condition)
	over, err := c.write(ctx, k)
	if err != nil || over {
		return client.IgnoreNotFound(err)
	}
	c.events.Event(k, kind, condition.Reason, condition.Message)
	if uid := k.Labels[api.EvictedLabel]; uid != "" {
		pod := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: k.Namespace, Name: k.Spec.Pod, UID: types.UID(uid)}
		c.events.Event(pod, kind, condition.Reason, fmt.Sprintf("the checkpoint %s before its end: %s", k.Name, condition.Message))
	}
	return nil
}
