// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"crypto/hpke"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
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
	"github.com/gpuckpt/gpuckpt/agent/turns"
)

const (
	// handover is how long the controller may take to hand over a push secret, and look how often the
	// agent looks for it.
	handover, look = 2 * time.Minute, 200 * time.Millisecond
)

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
	Checkpoint(ctx context.Context, w node.Wanted) ([]node.Captured, error)
	Discard(ctx context.Context, image string) error
	Recover(ctx context.Context) error
}

// controller takes the Checkpoints of pods of its node from their making to their end.
type controller struct {
	client client.Client
	// direct is not behind, and caches no pods.
	direct client.Reader
	events record.EventRecorder
	node   string // its name
	work   worker
	now    func() time.Time

	turns turns.Turns // a registry that does not answer keeps no other namespace waiting

	mu   sync.Mutex
	pods map[types.UID]client.ObjectKey // the pods that are being checkpointed, and by which Checkpoints
}

// failure is an error with a reason for the condition.
type failure struct {
	reason string
	err    error
}

func (f failure) Error() string { return f.err.Error() }
func (f failure) Unwrap() error { return f.err }

// errOver is the error of a Checkpoint that the controller has ended meanwhile.
var errOver = errors.New("the controller has ended the Checkpoint")

// Reconcile is called for each change of a Checkpoint, never twice at once for one.
func (c *controller) Reconcile(ctx context.Context, r ctrl.Request) (ctrl.Result, error) {
	var k api.Checkpoint
	if err := c.client.Get(ctx, r.NamespacedName, &k); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if k.Status.Phase.Over() || k.DeletionTimestamp != nil || k.Status.Node != c.node {
		return ctrl.Result{}, nil
	}
	if k.Status.Phase == api.Running {
		// What the agent has seen may be older than what it has done.
		if err := c.direct.Get(ctx, r.NamespacedName, &k); err != nil || k.Status.Phase.Over() {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
		// This agent is not at it: another one has begun it and is gone.
		return ctrl.Result{}, c.end(ctx, &k, nil, failure{api.Interrupted, errors.Join(errors.New("the node's agent was restarted meanwhile; the pod runs on"), c.work.Recover(ctx))})
	}
	end, ok := c.turns.Take(k.Namespace)
	if !ok {
		return ctrl.Result{RequeueAfter: turns.Next}, nil
	}
	defer end()
	began := metav1.NewTime(c.now())
	k.Status.Phase, k.Status.Stage, k.Status.StartTime = api.Running, api.Checkpointing, &began
	var key hpke.PrivateKey
	if k.Spec.PushSecret != "" {
		var err error
		if k.Status.Handover, key, err = api.NewHandover(); err != nil {
			return ctrl.Result{}, err
		}
	}
	if err := c.client.Status().Update(ctx, &k); err != nil { // a conflict: it comes again
		return ctrl.Result{}, err
	}
	pod, err := c.checkpoint(ctx, &k, key)
	if errors.Is(err, errOver) {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, c.end(ctx, &k, pod, err)
}

// checkpoint checkpoints and pushes the pod's containers, in one cut. On the node the images have names
// of ours: a name that the author of an object chose may be that of another's image. The pod is nil if
// it is gone.
func (c *controller) checkpoint(ctx context.Context, k *api.Checkpoint, key hpke.PrivateKey) (*corev1.Pod, error) {
	pod := new(corev1.Pod)
	err := patiently(ctx, func() error {
		return c.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.Pod}, pod)
	})
	if client.IgnoreNotFound(err) != nil {
		return nil, err
	}
	if err != nil || pod.UID != k.Status.PodUID {
		return nil, failure{"PodNotFound", fmt.Errorf("the pod %s is gone", k.Spec.Pod)}
	}
	c.mu.Lock()
	if c.pods == nil {
		c.pods = map[types.UID]client.ObjectKey{}
	}
	c.pods[pod.UID] = client.ObjectKeyFromObject(k)
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.pods, pod.UID)
		c.mu.Unlock()
	}()
	return pod, c.push(ctx, k, key, pod)
}

// checkpointed notes that a container of a pod is checkpointed. Whoever else writes the status meanwhile
// wins: this is to be looked at.
func (c *controller) checkpointed(ctx context.Context, pod types.UID, bytes int64) {
	c.mu.Lock()
	key, ok := c.pods[pod]
	c.mu.Unlock()
	var k api.Checkpoint
	if !ok || c.direct.Get(ctx, key, &k) != nil || k.Status.Phase != api.Running {
		return
	}
	k.Status.Stage, k.Status.Bytes = api.Pushing, k.Status.Bytes+bytes
	_ = c.client.Status().Update(ctx, &k)
}

func (c *controller) push(ctx context.Context, k *api.Checkpoint, key hpke.PrivateKey, pod *corev1.Pod) error {
	var names []string
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) { // sidecars are among the first
		if s.State.Running != nil && (k.Spec.Container == "" || k.Spec.Container == s.Name) {
			names = append(names, s.Name)
		}
	}
	if len(names) == 0 {
		return failure{"NotRunning", fmt.Errorf("no such container of the pod %s runs", pod.Name)}
	}
	credentials, err := c.credentials(ctx, k, key)
	if err != nil {
		return err
	}
	// No pod can name it: a repository of Kubernetes' is in small letters.
	image := "gpuckpt.invalid/Checkpoint/" + string(k.UID) + ":1"
	target := k.Spec.Repository + ":" + cmp.Or(k.Spec.Tag, k.Name)
	if len(names) == 1 && len(pod.Spec.Containers) > 1 {
		target += "-" + names[0]
	}
	made, err := c.work.Checkpoint(ctx, node.Wanted{
		Namespace: pod.Namespace, Pod: pod.Name, Containers: names, Image: image, Target: target,
		Credentials: credentials, Limit: time.Duration(k.Spec.TimeoutSeconds) * time.Second,
	})
	if err != nil {
		return failure{"CheckpointFailed", err}
	}
	var failed []error
	for _, m := range made {
		if m.Push == nil {
			err := fmt.Errorf("container %s: %s", m.Name, m.PushError)
			if c.ends(ctx, pod) {
				failed = append(failed, fmt.Errorf("%w; the pod ends, so its image stays on the node %s: there, gpuckpt image push --namespace k8s.io %s %s sends it",
					err, c.node, m.Image, target+strings.TrimPrefix(m.Image, image)))
				continue
			}
			failed = append(failed, err)
		} else {
			k.Status.Bytes += m.Bytes
			k.Status.Containers = append(k.Status.Containers, api.Container{
				Name: m.Name, Image: m.Push.Image, Digest: m.Push.Digest, Bytes: m.Bytes, GPUBytes: m.GPUBytes, Pushed: m.Push.Moved,
				Checkpoint: seconds(m.PausedSeconds), Build: seconds(m.BuildSeconds), Push: seconds(m.Push.Took),
			})
		}
		if err := c.work.Discard(context.WithoutCancel(ctx), m.Image); err != nil {
			failed = append(failed, err)
		}
	}
	if err := errors.Join(failed...); err != nil {
		return failure{"PushFailed", err}
	}
	return nil
}

// credentials returns the docker config.json to push with, which the controller hands over.
func (c *controller) credentials(ctx context.Context, k *api.Checkpoint, key hpke.PrivateKey) ([]byte, error) {
	if key == nil {
		return []byte("{}"), nil
	}
	wait, cancel := context.WithTimeout(ctx, handover)
	defer cancel()
	for k.Status.Handover == nil || k.Status.Handover.Sealed == nil {
		select {
		case <-wait.Done():
			return nil, failure{"NoCredentials", fmt.Errorf("the controller has not handed over the push secret within %s: see whether the Deployment gpuckpt-controller is ready", handover)}
		case <-time.After(look):
		}
		err := c.direct.Get(ctx, client.ObjectKeyFromObject(k), k)
		if err == nil && k.Status.Phase.Over() {
			return nil, errOver
		}
		if err != nil && !api.Passes(err) {
			return nil, err
		}
	}
	credentials, err := k.Status.Handover.Open(string(k.UID), key)
	if err != nil {
		return nil, failure{"NoCredentials", fmt.Errorf("open what the controller has handed over: %w", err)}
	}
	return credentials, nil
}

func seconds(s float64) metav1.Duration {
	return metav1.Duration{Duration: time.Duration(s * float64(time.Second)).Round(time.Millisecond)}
}

// ends reports whether a pod has ended, or is about to: an image that is not in the registry is then all
// that is left of it. That is asked of the pod, and not of the Checkpoint, whose author may write
// anything there.
func (c *controller) ends(ctx context.Context, pod *corev1.Pod) bool {
	ctx = context.WithoutCancel(ctx)
	var now corev1.Pod
	err := patiently(ctx, func() error { return c.direct.Get(ctx, client.ObjectKeyFromObject(pod), &now) })
	return err != nil || now.UID != pod.UID || now.DeletionTimestamp != nil || now.Status.Phase == corev1.PodFailed || api.Ending(&now) != ""
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

// end says what came of a Checkpoint: in its status, as an event of it, and of the pod if that ends. pod
// may be nil.
func (c *controller) end(ctx context.Context, k *api.Checkpoint, pod *corev1.Pod, err error) error {
	ctx = context.WithoutCancel(ctx) // an agent that ends says so
	now := metav1.NewTime(c.now())
	condition := metav1.Condition{Type: api.Complete, Status: metav1.ConditionTrue, Reason: "Pushed", Message: "all is in the registry", ObservedGeneration: k.Generation}
	k.Status.Phase, k.Status.Stage, k.Status.CompletionTime, k.Status.Handover = api.Succeeded, "", &now, nil
	kind := corev1.EventTypeNormal
	if err != nil {
		kind, k.Status.Phase = corev1.EventTypeWarning, api.Failed
		condition.Type, condition.Reason, condition.Message = api.HasFailed, "Failed", api.Text(err.Error())
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
	if pod != nil && api.Ending(pod) != "" {
		c.events.Event(pod, kind, condition.Reason, fmt.Sprintf("the checkpoint %s before its end: %s", k.Name, condition.Message))
	}
	return nil
}
