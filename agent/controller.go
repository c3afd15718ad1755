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
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
	// restarts is how often an agent goes on with what another one has left: it may be what ends them.
	restarts = 3
	// percentEvery is how often a Checkpoint says how far its push is, and tellLimit how long that may take.
	percentEvery, tellLimit = 5 * time.Second, 10 * time.Second
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
	Taken(ctx context.Context, prefix string) ([]node.Captured, error)
	Push(ctx context.Context, w node.Wanted, made []node.Captured)
	Discard(ctx context.Context, image string) error
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
	// recovering is held while what an agent that is gone has left paused is let run on.
	recovering sync.WaitGroup

	pods sync.Map // the UIDs of pods that are being checkpointed, and the client.ObjectKeys of their Checkpoints
}

// errOver is the error of a Checkpoint that the controller has ended meanwhile, or somebody replaced.
var errOver = errors.New("the controller has ended the Checkpoint, or it is another one")

// Reconcile is called for each change of a Checkpoint, never twice at once for one.
func (c *controller) Reconcile(ctx context.Context, r ctrl.Request) (ctrl.Result, error) {
	var k api.Checkpoint
	if err := c.client.Get(ctx, r.NamespacedName, &k); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if k.Status.Phase.Over() || k.Status.Node != c.node || k.DeletionTimestamp != nil && k.Status.Phase != api.Running {
		return ctrl.Result{}, nil
	}
	c.recovering.Wait() // a container that it has not let run on would be taken for one that its client has paused
	left := k.Status.Phase == api.Running
	if left {
		// What the agent has seen may be older than what it has done.
		uid := k.UID
		if err := c.direct.Get(ctx, r.NamespacedName, &k); err != nil || k.UID != uid || k.Status.Phase != api.Running || k.Status.Node != c.node {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
	}
	end, ok := c.turns.Take(k.Namespace)
	if !ok {
		return ctrl.Result{RequeueAfter: turns.Next}, nil
	}
	defer end()
	var made []node.Captured
	if k.Status.Phase, k.Status.Stage = api.Running, api.Checkpointing; left {
		// This agent is not at it: another one has begun it and is gone.
		var err error
		if made, err = c.taken(ctx, &k); err != nil {
			return ctrl.Result{}, c.end(ctx, &k, nil, api.Fail(api.Interrupted, "the node's agent was restarted meanwhile: %w", err))
		}
		if made != nil {
			k.Status.Stage = api.Pushing
		} else {
			k.Status.Percent = 0
		}
		k.Status.Restarts, k.Status.Bytes, k.Status.Containers = k.Status.Restarts+1, 0, nil
	} else {
		k.Status.StartTime = new(metav1.NewTime(c.now()))
	}
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
	wanted, stop := context.WithCancel(ctx)
	defer stop()
	if k.DeletionTimestamp == nil {
		go c.stopUnwanted(wanted, stop, client.ObjectKeyFromObject(&k), k.UID)
	}
	pod, made, err := c.checkpoint(wanted, &k, key, made)
	if err != nil && wanted.Err() != nil && ctx.Err() == nil && (made == nil || !c.ends(ctx, &k)) { // it is deleted
		if made, err = c.taken(ctx, &k); err == nil {
			err = api.Fail(api.Interrupted, "the Checkpoint was deleted; the pod runs on")
		}
	}
	if !errors.Is(err, errOver) {
		if err := c.end(ctx, &k, pod, err); err != nil {
			return ctrl.Result{}, err
		}
	}
	ctx = context.WithoutCancel(ctx)
	unwanted := litter(wanted, &k, pod)
	for _, m := range made {
		if m.Push == nil && !unwanted && (m.Stays || c.ends(ctx, &k)) {
			continue
		}
		if err := patiently(ctx, func() error { return c.work.Discard(ctx, m.Image) }); err != nil {
			ctrl.LoggerFrom(ctx).Error(err, "remove an image of a Checkpoint that is over", "image", m.Image)
		}
	}
	return ctrl.Result{}, nil
}

// litter reports whether nobody would ask for an image that is not pushed: its Checkpoint is deleted, which alone
// says where it is, and its pod has not asked to be checkpointed before its end, as a replica that goes with both.
// ctx ends with the Checkpoint.
func litter(ctx context.Context, k *api.Checkpoint, pod *corev1.Pod) bool {
	deleted := k.DeletionTimestamp != nil || ctx.Err() != nil
	return deleted && pod != nil && pod.Annotations[api.OnEviction] == "" && pod.Annotations[api.OnDeletion] == ""
}

// stopUnwanted calls stop when the Checkpoint is deleted. What it waits for, such as a registry that does
// not answer, keeps the namespace's other Checkpoints waiting.
func (c *controller) stopUnwanted(ctx context.Context, stop func(), key client.ObjectKey, uid types.UID) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		var now api.Checkpoint
		err := c.client.Get(ctx, key, &now)
		if apierrors.IsNotFound(err) || err == nil && (now.UID != uid || now.DeletionTimestamp != nil) {
			stop()
		}
	}, look)
}

// sweepEvery is how long an image stays that could not be removed.
const sweepEvery = time.Minute

// sweep removes the images of Checkpoints that are over, whose agent ended before it did so, or could not: what is in the
// registry, and what is not while the pod runs on.
func (c *controller) sweep(ctx context.Context) error {
	taken, err := c.work.Taken(ctx, allImages)
	if err != nil || len(taken) == 0 {
		return err
	}
	var all api.CheckpointList
	if err := c.direct.List(ctx, &all); err != nil {
		return err
	}
	for _, m := range taken {
		if slices.ContainsFunc(all.Items, func(k api.Checkpoint) bool {
			return strings.HasPrefix(m.Image, images(&k)) && (k.Status.Phase == api.Succeeded || k.Status.Phase == api.Failed && !c.ends(ctx, &k))
		}) {
			err = errors.Join(err, c.work.Discard(ctx, m.Image))
		}
	}
	return err
}

// allImages begins the names of all Checkpoints' images on a node.
const allImages = "gpuckpt.invalid/Checkpoint/"

// images begins the names of a Checkpoint's images on the node. The number of them follows, and "-" and
// the container's name where the pod has several. No pod can name them: a repository of Kubernetes' is in
// small letters.
func images(k *api.Checkpoint) string { return allImages + string(k.UID) + ":" }

// taken returns the images that an agent that is gone has taken; nil if not all are there, and then none is left.
func (c *controller) taken(ctx context.Context, k *api.Checkpoint) (all []node.Captured, err error) {
	err = patiently(ctx, func() error {
		all, err = c.work.Taken(ctx, images(k))
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, m := range all {
		if number, _, _ := strings.Cut(strings.TrimPrefix(m.Image, images(k)), "-"); number == strconv.Itoa(len(all)) {
			continue
		}
		for _, m := range all {
			err = errors.Join(err, c.work.Discard(ctx, m.Image))
		}
		return nil, err
	}
	return all, nil
}

// checkpoint checkpoints and pushes the pod's containers, in one cut, or pushes what was made before. The
// pod is nil if it is gone. What is made may be there also after an error.
func (c *controller) checkpoint(ctx context.Context, k *api.Checkpoint, key hpke.PrivateKey, made []node.Captured) (*corev1.Pod, []node.Captured, error) {
	pod := new(corev1.Pod)
	err := patiently(ctx, func() error {
		return c.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.Pod}, pod)
	})
	if client.IgnoreNotFound(err) != nil {
		return nil, made, err
	}
	if err != nil || pod.UID != k.Status.PodUID {
		if pod = nil; made == nil {
			return nil, nil, api.Fail(api.PodNotFound, "the pod %s is gone", k.Spec.Pod)
		}
	}
	c.pods.Store(k.Status.PodUID, client.ObjectKeyFromObject(k))
	defer c.pods.Delete(k.Status.PodUID)
	made, err = c.push(ctx, k, key, pod, made)
	return pod, made, err
}

// checkpointed notes that a container of a pod is checkpointed. Whoever else writes the status meanwhile
// wins: this is to be looked at.
func (c *controller) checkpointed(ctx context.Context, pod types.UID, bytes int64) {
	found, _ := c.pods.Load(pod)
	key, ok := found.(client.ObjectKey)
	var k api.Checkpoint
	if !ok || c.direct.Get(ctx, key, &k) != nil || k.Status.Phase != api.Running {
		return
	}
	k.Status.Stage, k.Status.Bytes = api.Pushing, k.Status.Bytes+bytes
	_ = c.client.Status().Update(ctx, &k)
}

// pushing returns what notes how far the push of a Checkpoint is, as checkpointed does. It is no less than
// what an agent that is gone has noted.
func (c *controller) pushing(ctx context.Context, k *api.Checkpoint) func(done, total uint64) {
	key, told, before := client.ObjectKeyFromObject(k), c.now(), k.Status.Percent
	return func(done, total uint64) {
		var k api.Checkpoint
		if total == 0 || c.now().Sub(told) < percentEvery {
			return
		}
		told = c.now()
		ctx, cancel := context.WithTimeout(ctx, tellLimit) // nobody reads meanwhile what is said next
		defer cancel()
		if c.direct.Get(ctx, key, &k) != nil || k.Status.Phase != api.Running || k.Status.Stage != api.Pushing {
			return
		}
		k.Status.Percent = max(before, int32(min(done, total)*100/total))
		_ = c.client.Status().Update(ctx, &k)
	}
}

// push takes the images, unless they are made, and pushes them. On the node they have names of ours: a
// name that the author of an object chose may be that of another's image.
func (c *controller) push(ctx context.Context, k *api.Checkpoint, key hpke.PrivateKey, pod *corev1.Pod, made []node.Captured) ([]node.Captured, error) {
	w := node.Wanted{
		Namespace: k.Namespace, Pod: k.Spec.Pod, Image: images(k) + strconv.Itoa(len(made)), Target: k.Spec.Repository + ":" + cmp.Or(k.Spec.Tag, k.Name),
		Limit: time.Duration(k.Spec.TimeoutSeconds) * time.Second, Progress: c.pushing(ctx, k),
	}
	tired := ""
	if k.DeletionTimestamp != nil {
		tired = "the Checkpoint was deleted"
	} else if k.Status.Restarts > restarts {
		tired = fmt.Sprintf("the node's agent was restarted %d times meanwhile", k.Status.Restarts)
	}
	if made == nil {
		if tired != "" {
			return nil, api.Fail(api.Interrupted, "%s; the pod runs on", tired)
		}
		var has []string
		for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) { // sidecars are among the first
			has = append(has, s.Name)
			if s.State.Running != nil && (k.Spec.Container == "" || k.Spec.Container == s.Name) {
				w.Containers = append(w.Containers, s.Name)
			}
		}
		if len(w.Containers) == 0 {
			return nil, api.Fail(api.NotRunning, "no %s of the pod %s runs: it is %s, and has %s", strings.TrimSpace("container "+k.Spec.Container), pod.Name, pod.Status.Phase, strings.Join(has, ", "))
		}
		w.Image = images(k) + strconv.Itoa(len(w.Containers))
		if len(w.Containers) == 1 && len(pod.Spec.Containers) > 1 {
			w.Image, w.Target = w.Image+"-"+w.Containers[0], w.Target+"-"+w.Containers[0]
		}
	}
	if tired == "" {
		var err error
		if w.Credentials, err = c.credentials(ctx, k, key); err != nil {
			return made, err
		}
		if made == nil {
			if made, err = c.work.Checkpoint(ctx, w); err != nil {
				return nil, api.Fail(api.CheckpointFailed, "%w", err)
			}
		} else {
			c.work.Push(ctx, w, made)
		}
	}
	var failed []error
	for i, m := range made {
		if m.Push != nil {
			k.Status.Bytes += m.Bytes
			k.Status.Containers = append(k.Status.Containers, api.Container{
				Name: m.Name, Image: m.Push.Image, Digest: m.Push.Digest, Bytes: m.Bytes, GPUBytes: m.GPUBytes, Pushed: m.Push.Moved,
				Checkpoint: seconds(m.PausedSeconds), Build: seconds(m.BuildSeconds), Push: seconds(m.Push.Took),
			})
			continue
		}
		err := fmt.Errorf("container %s: %s", m.Name, cmp.Or(m.PushError, tired))
		if made[i].Stays = !litter(ctx, k, pod) && c.ends(ctx, k); made[i].Stays {
			err = fmt.Errorf("%w; the pod ends, so its image stays on the node %s: there, gpuckpt image push --namespace k8s.io %s %s sends it",
				err, c.node, m.Image, w.Target+strings.TrimPrefix(m.Image, w.Image))
		}
		failed = append(failed, err)
	}
	if err := errors.Join(failed...); err != nil {
		return made, api.Fail(api.PushFailed, "%w", err)
	}
	return made, nil
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
			return nil, api.Fail(api.NoCredentials, "the controller has not handed over the push secret within %s: see whether the Deployment gpuckpt-controller is ready", handover)
		case <-time.After(look):
		}
		var now api.Checkpoint
		err := c.direct.Get(ctx, client.ObjectKeyFromObject(k), &now)
		if err == nil && (now.UID != k.UID || now.Status.Phase.Over()) {
			return nil, errOver
		}
		if err != nil && !api.Passes(err) {
			return nil, err
		}
		if err == nil {
			*k = now
		}
	}
	credentials, err := k.Status.Handover.Open(string(k.UID), key)
	if err != nil {
		return nil, api.Fail(api.NoCredentials, "open what the controller has handed over: %w", err)
	}
	return credentials, nil
}

func seconds(s float64) metav1.Duration {
	return metav1.Duration{Duration: time.Duration(s * float64(time.Second)).Round(time.Millisecond)}
}

// ends reports whether the pod has ended, or is about to: an image that is not in the registry is then all
// that is left of it. That is asked of the pod, and not of the Checkpoint, whose author may write
// anything there.
func (c *controller) ends(ctx context.Context, k *api.Checkpoint) bool {
	ctx = context.WithoutCancel(ctx)
	var now corev1.Pod
	err := patiently(ctx, func() error {
		return c.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.Pod}, &now)
	})
	return err != nil || now.UID != k.Status.PodUID || now.DeletionTimestamp != nil || now.Status.Phase == corev1.PodFailed
}

// write writes the status of a Checkpoint. over says that somebody has said before what came of it, or has made another
// one of its name.
func (c *controller) write(ctx context.Context, k *api.Checkpoint) (over bool, err error) {
	status, uid := k.Status, k.UID
	err = patiently(ctx, func() error {
		err := c.client.Status().Update(ctx, k)
		for ; apierrors.IsConflict(err); err = c.client.Status().Update(ctx, k) { // somebody has put a label to it, or it is over
			var now api.Checkpoint
			if err := c.direct.Get(ctx, client.ObjectKeyFromObject(k), &now); err != nil || now.UID != uid || now.Status.Phase.Over() {
				over = err == nil
				return err
			}
			now.Status = status
			*k = now
		}
		return err
	})
	return over, err
}

// end says what came of a Checkpoint: in its status, as an event of it, and of the pod if that ends. pod
// may be nil. After an error the Checkpoint is not over.
func (c *controller) end(ctx context.Context, k *api.Checkpoint, pod *corev1.Pod, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx) // this agent ends, and the next one goes on
	}
	ctx = context.WithoutCancel(ctx)
	kind, phase, reason, message := corev1.EventTypeNormal, api.Succeeded, api.Pushed, "all is in the registry"
	if err != nil {
		kind, phase, reason, message = corev1.EventTypeWarning, api.Failed, api.OtherCause, api.Text(err.Error())
		if f, ok := errors.AsType[*api.Failure](err); ok {
			reason = f.Reason
		}
	}
	k.End(c.now(), phase, reason, message)
	over, err := c.write(ctx, k)
	if err != nil || over {
		return client.IgnoreNotFound(err)
	}
	c.events.Event(k, kind, reason, message)
	if pod != nil && api.Ending(pod) != "" {
		c.events.Event(pod, kind, reason, fmt.Sprintf("the checkpoint %s before its end: %s", k.Name, message))
	}
	return nil
}
