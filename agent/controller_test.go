// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpuckpt/gpuckpt/agent/api"
	"github.com/gpuckpt/gpuckpt/agent/node"
)

// diary is a worker that notes what is asked of it, and fails at one thing.
type diary struct {
	did   []string
	fails string
	taken []string // what the images of an agent before are called, behind ours
}

func (d *diary) do(what string) error {
	d.did = append(d.did, what)
	if what == d.fails {
		return errors.New("broken")
	}
	return nil
}

// ours begins the names of the images of the Checkpoint k on the node.
const ours = "gpuckpt.invalid/Checkpoint/uid-of-k:"

func (d *diary) Checkpoint(ctx context.Context, w node.Wanted) (made []node.Captured, err error) {
	names := strings.Join(w.Containers, ",")
	if err := d.do("checkpoint " + w.Namespace + "/" + w.Pod + " " + names); err != nil {
		return nil, err
	}
	if !strings.HasPrefix(w.Image, ours) {
		return nil, errors.New("the image is called " + w.Image)
	}
	for _, name := range w.Containers {
		end := "-" + name
		if len(w.Containers) == 1 {
			end = ""
		}
		made = append(made, node.Captured{Name: name, Image: w.Image + end, Bytes: 2, GPUBytes: 3})
	}
	d.Push(ctx, w, made)
	return made, nil
}

func (d *diary) Push(_ context.Context, w node.Wanted, made []node.Captured) {
	for i := range made {
		m, target := &made[i], w.Target+strings.TrimPrefix(made[i].Image, w.Image)
		if err := d.do("push " + target + " " + string(w.Credentials)); err != nil {
			m.PushError = err.Error()
		} else {
			m.Push = &node.Pushed{Image: target, Digest: "sha256:1", Moved: 4}
		}
	}
}

func (d *diary) Taken(_ context.Context, prefix string) (taken []node.Captured, err error) {
	for _, end := range d.taken {
		taken = append(taken, node.Captured{Name: "a", Image: prefix + end, Bytes: 2, GPUBytes: 3})
	}
	return taken, d.do("look for " + prefix)
}

func (d *diary) Discard(_ context.Context, image string) error {
	return d.do("discard " + strings.TrimPrefix(image, ours))
}

// handsOver is the cluster's controller: it hands over the secret "registry", and ends the Checkpoints of
// all others.
func handsOver(ctx context.Context, to client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
	err := to.SubResource(sub).Update(ctx, o, opts...)
	k, ok := o.DeepCopyObject().(*api.Checkpoint)
	if err != nil || !ok || k.Status.Handover == nil || k.Status.Handover.Sealed != nil {
		return err
	}
	if k.Spec.PushSecret != "registry" {
		k.Status.Phase, k.Status.Handover = api.Failed, nil
	} else if err := k.Status.Handover.Seal(string(k.UID), []byte("secret")); err != nil {
		return err
	}
	return to.SubResource(sub).Update(ctx, k)
}

// world is a cluster that has objects.
func world(t *testing.T, objects ...client.Object) *fake.ClientBuilder {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(api.AddTo(scheme), corev1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	return fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&api.Checkpoint{}).WithObjects(objects...)
}

// runningPod is the pod of the Checkpoint k.
func runningPod(nodeName string, containers ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pod", UID: "1"}, Spec: corev1.PodSpec{NodeName: nodeName}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	for _, name := range containers {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: name})
		p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, corev1.ContainerStatus{Name: name, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}})
	}
	return p
}

func TestController(t *testing.T) {
	pod := runningPod
	left := func(restarts int32) api.Status {
		return api.Status{Phase: api.Running, Stage: api.Pushing, Restarts: restarts, Bytes: 7, Node: "here", Conditions: []metav1.Condition{{Type: api.Waiting, Status: metav1.ConditionTrue, Reason: api.NoAgent}}}
	}
	for _, c := range []struct {
		name   string
		pod    *corev1.Pod
		spec   api.Spec
		before api.Status
		taken  []string
		fails  string
		did    []string
		phase  api.Phase
		reason string
		made   int  // images that are pushed; 0: one, of what has succeeded
		ends   bool // the pod is evicted, and to be checkpointed before
		label  bool // the Checkpoint's author says so
		other  bool // another pod has the name
		goes   bool // the Checkpoint is deleted
	}{
		{name: "one container", pod: pod("here", "a"), spec: api.Spec{PushSecret: "registry"},
			did: []string{"checkpoint ns/pod a", "push r/job:k secret", "discard 1"}, phase: api.Succeeded, reason: "Pushed"},
		{name: "all of two", pod: pod("here", "a", "b"),
			did: []string{"checkpoint ns/pod a,b", "push r/job:k-a {}", "push r/job:k-b {}", "discard 2-a", "discard 2-b"}, phase: api.Succeeded, reason: "Pushed", made: 2},
		{name: "all of two, and one is refused", pod: pod("here", "a", "b"), fails: "checkpoint ns/pod a,b",
			did: []string{"checkpoint ns/pod a,b"}, phase: api.Failed, reason: "CheckpointFailed"},
		{name: "all of two, and one cannot be pushed", pod: pod("here", "a", "b"), fails: "push r/job:k-a {}",
			did: []string{"checkpoint ns/pod a,b", "push r/job:k-a {}", "push r/job:k-b {}", "discard 2-a", "discard 2-b"}, phase: api.Failed, reason: "PushFailed", made: 1},
		{name: "one of two", pod: pod("here", "a", "b"), spec: api.Spec{Container: "b"},
			did: []string{"checkpoint ns/pod b", "push r/job:k-b {}", "discard 1-b"}, phase: api.Succeeded, reason: "Pushed"},
		{name: "the controller deletes the pod", pod: pod("here", "a"), spec: api.Spec{LeaveRunning: new(bool)},
			did: []string{"checkpoint ns/pod a", "push r/job:k {}", "discard 1"}, phase: api.Succeeded, reason: "Pushed"},
		{name: "a push that fails keeps the pod", pod: pod("here", "a"), spec: api.Spec{LeaveRunning: new(bool)}, fails: "push r/job:k {}",
			did: []string{"checkpoint ns/pod a", "push r/job:k {}", "discard 1"}, phase: api.Failed, reason: "PushFailed"},
		{name: "a label keeps no image", pod: pod("here", "a"), label: true, fails: "push r/job:k {}",
			did: []string{"checkpoint ns/pod a", "push r/job:k {}", "discard 1"}, phase: api.Failed, reason: "PushFailed"},
		{name: "a push that fails keeps the image of a pod that ends", pod: pod("here", "a"), ends: true, fails: "push r/job:k {}",
			did: []string{"checkpoint ns/pod a", "push r/job:k {}"}, phase: api.Failed, reason: "PushFailed"},
		{name: "of two that end one can be pushed", pod: pod("here", "a", "b"), ends: true, fails: "push r/job:k-a {}",
			did: []string{"checkpoint ns/pod a,b", "push r/job:k-a {}", "push r/job:k-b {}", "discard 2-b"}, phase: api.Failed, reason: "PushFailed", made: 1},
		{name: "a checkpoint that is refused", pod: pod("here", "a"), fails: "checkpoint ns/pod a", did: []string{"checkpoint ns/pod a"}, phase: api.Failed, reason: "CheckpointFailed"},
		{name: "no secret", pod: pod("here", "a"), spec: api.Spec{PushSecret: "other"}, phase: api.Failed},
		{name: "no such container", pod: pod("here", "a"), spec: api.Spec{Container: "c"}, phase: api.Failed, reason: "NotRunning"},
		{name: "no pod", phase: api.Failed, reason: "PodNotFound"},
		{name: "another pod of the name", pod: pod("here", "a"), other: true, phase: api.Failed, reason: "PodNotFound"},
		{name: "another node's", pod: pod("there", "a"), before: api.Status{Node: "there"}},
		{name: "of no node yet", pod: pod("here", "a"), before: api.Status{Conditions: []metav1.Condition{{Type: api.Waiting}}}},
		{name: "an agent that was killed", pod: pod("here", "a"), before: left(0), spec: api.Spec{PushSecret: "registry"},
			did: []string{"look for " + ours, "checkpoint ns/pod a", "push r/job:k secret", "discard 1"}, phase: api.Succeeded, reason: "Pushed"},
		{name: "it was killed when all was taken", pod: pod("here", "a", "b"), before: left(2), taken: []string{"2-a", "2-b"}, spec: api.Spec{PushSecret: "registry"},
			did: []string{"look for " + ours, "push r/job:k-a secret", "push r/job:k-b secret", "discard 2-a", "discard 2-b"}, phase: api.Succeeded, reason: "Pushed", made: 2},
		{name: "it was killed when one of two was taken, which was asked for", pod: pod("here", "a", "b"), before: left(0), taken: []string{"1-a"},
			did: []string{"look for " + ours, "push r/job:k-a {}", "discard 1-a"}, phase: api.Succeeded, reason: "Pushed"},
		{name: "it was killed while it named the images", pod: pod("here", "a", "b"), before: left(0), taken: []string{"2-a"},
			did: []string{"look for " + ours, "discard 2-a", "checkpoint ns/pod a,b", "push r/job:k-a {}", "push r/job:k-b {}", "discard 2-a", "discard 2-b"}, phase: api.Succeeded, reason: "Pushed", made: 2},
		{name: "it was killed, and the pod is gone", before: left(0), did: []string{"look for " + ours}, phase: api.Failed, reason: "PodNotFound"},
		{name: "it was killed when all was taken, and the pod is gone", before: left(0), taken: []string{"1"},
			did: []string{"look for " + ours, "push r/job:k {}", "discard 1"}, phase: api.Succeeded, reason: "Pushed"},
		{name: "it was killed again and again", pod: pod("here", "a"), before: left(restarts), did: []string{"look for " + ours}, phase: api.Failed, reason: api.Interrupted},
		{name: "it was killed again and again when all was taken", pod: pod("here", "a"), before: left(restarts), taken: []string{"1"},
			did: []string{"look for " + ours, "discard 1"}, phase: api.Failed, reason: "PushFailed"},
		{name: "it was killed again and again, and the pod ends", pod: pod("here", "a"), ends: true, before: left(restarts), taken: []string{"1"},
			did: []string{"look for " + ours}, phase: api.Failed, reason: "PushFailed"},
		{name: "deleted before it began", pod: pod("here", "a"), goes: true},
		{name: "it was killed, and the Checkpoint is deleted", pod: pod("here", "a"), before: left(0), goes: true, did: []string{"look for " + ours}, phase: api.Failed, reason: api.Interrupted},
		{name: "it was killed when all was taken, and the Checkpoint is deleted", pod: pod("here", "a"), before: left(0), goes: true, taken: []string{"1"},
			did: []string{"look for " + ours, "discard 1"}, phase: api.Failed, reason: "PushFailed"},
		{name: "another agent is at it", pod: pod("here", "a"), before: api.Status{Phase: api.Running, Node: "there"}, phase: api.Running},
		{name: "it is over", pod: pod("here", "a"), before: api.Status{Phase: api.Succeeded}, phase: api.Succeeded},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.spec.Pod, c.spec.Repository = "pod", "r/job"
			k := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "uid-of-k"}, Spec: c.spec, Status: c.before}
			if c.label {
				k.Labels = map[string]string{api.EvictedLabel: "1"}
			}
			if c.goes {
				now := metav1.Now()
				k.Finalizers, k.DeletionTimestamp = []string{api.ImageFinalizer}, &now
			}
			if c.ends {
				c.pod.Annotations = map[string]string{api.OnEviction: api.DoCheckpoint}
				c.pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}
				c.pod.DeletionTimestamp, c.pod.Finalizers = new(metav1.Now()), []string{"t/t"}
			}
			if k.Status.Phase == "" && k.Status.Node == "" && k.Status.Conditions == nil {
				k.Status.Node = "here"
			}
			k.Status.PodUID = "1"
			if c.other {
				k.Status.PodUID = "2"
			}
			objects := []client.Object{k}
			if c.pod != nil {
				objects = append(objects, c.pod)
			}
			cluster := world(t, objects...).WithInterceptorFuncs(interceptor.Funcs{SubResourceUpdate: handsOver}).Build()
			d, events := &diary{fails: c.fails, taken: c.taken}, record.NewFakeRecorder(10)
			r := &controller{client: cluster, direct: cluster, events: events, node: "here", work: d, now: time.Now}
			key := client.ObjectKeyFromObject(k)
			if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key}); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(d.did, c.did) {
				t.Errorf("it did %q, want %q", d.did, c.did)
			}
			if err := cluster.Get(t.Context(), key, k); err != nil {
				t.Fatal(err)
			}
			if k.Status.Phase != c.phase {
				t.Errorf("it is %q, want %q", k.Status.Phase, c.phase)
			}
			said := meta.FindStatusCondition(k.Status.Conditions, map[api.Phase]string{api.Succeeded: api.Complete, api.Failed: api.HasFailed}[c.phase])
			if c.reason == "NotRunning" && said != nil && said.Message != "no container c of the pod pod runs: it is Running, and has a" {
				t.Errorf("it says %s", said.Message)
			}
			if c.reason != "" && (said == nil || said.Reason != c.reason || len(k.Status.Conditions) != 1 || len(events.Events) != 1 && !c.ends) {
				t.Errorf("its conditions are %+v, %d events", k.Status.Conditions, len(events.Events))
			}
			want := c.made
			if c.phase == api.Succeeded && c.reason != "" {
				want = cmp.Or(want, 1)
			}
			if got := k.Status.Containers; len(got) != want || want > 0 && (!strings.HasPrefix(got[0].Image, "r/job:k") || got[0].Digest != "sha256:1" || got[0].Pushed != 4) {
				t.Errorf("%+v", got)
			}
			if c.phase == api.Succeeded && c.reason != "" && k.Status.Bytes != 2*int64(want) {
				t.Errorf("it has %d bytes", k.Status.Bytes)
			}
			if k.Status.Phase.Over() && k.Status.Handover != nil {
				t.Error("what was handed over is still there")
			}
			if c.pod != nil {
				if err := cluster.Get(t.Context(), client.ObjectKeyFromObject(c.pod), &corev1.Pod{}); err != nil {
					t.Error(err)
				}
			}
			if c.fails != "" && (said == nil || !strings.Contains(said.Message, "broken")) {
				t.Errorf("it says %+v", said)
			}
			if c.ends && said != nil && !strings.Contains(said.Message, "stays on the node here") {
				t.Errorf("it says %s", said.Message)
			}
		})
	}
}

// behind is a client that still has an object as it was.
type behind struct {
	client.Client
	k *api.Checkpoint
}

func (b behind) Get(_ context.Context, _ client.ObjectKey, to client.Object, _ ...client.GetOption) error {
	*to.(*api.Checkpoint) = *b.k.DeepCopy()
	return nil
}

// busybody is a worker during whose work somebody puts a label to the Checkpoint.
type busybody struct {
	*diary
	put func() error
}

func (b busybody) Checkpoint(ctx context.Context, w node.Wanted) ([]node.Captured, error) {
	if err := b.put(); err != nil {
		return nil, err
	}
	return b.diary.Checkpoint(ctx, w)
}

// patient is a worker that pushes until it is told to stop.
type patient struct {
	*diary
	pushes func()
}

func (p patient) Push(ctx context.Context, _ node.Wanted, made []node.Captured) {
	p.pushes()
	<-ctx.Done()
	made[0].PushError = "stopped"
}

// A Checkpoint that is deleted while its registry does not answer ends, and leaves no image, so that the
// next one of the namespace begins. Of a pod that ends and has asked for it an image stays: it is all that is left.
func TestDeletedWhileItPushes(t *testing.T) {
	for _, c := range []struct {
		ends, asked bool
		did         []string
	}{
		{false, false, []string{"look for " + ours, "look for " + ours, "discard 1"}},
		{true, false, []string{"look for " + ours, "discard 1"}},
		{true, true, []string{"look for " + ours}},
	} {
		synctest.Test(t, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pod", UID: "1"}}
			if c.ends {
				pod.DeletionTimestamp, pod.Finalizers = new(metav1.Now()), []string{"t/t"}
			}
			if c.asked {
				pod.Annotations = map[string]string{api.OnDeletion: api.DoCheckpoint}
			}
			k := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "uid-of-k"}, Spec: api.Spec{Pod: "pod", Repository: "r/job"}, Status: api.Status{Phase: api.Running, Node: "here", PodUID: "1"}}
			cluster := world(t, k, pod).Build()
			d := &diary{taken: []string{"1"}}
			r := &controller{client: cluster, direct: cluster, events: record.NewFakeRecorder(10), node: "here", now: time.Now, work: patient{d, func() {
				if err := cluster.Delete(t.Context(), k); err != nil {
					t.Error(err)
				}
			}}}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, err := r.Reconcile(ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(k)}); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(d.did, c.did) {
				t.Errorf("it ends: %t, and has asked: %t: it did %q, want %q", c.ends, c.asked, d.did, c.did)
			}
			if _, ok := r.turns.Take("ns"); !ok {
				t.Error("the next one waits")
			}
		})
	}
}

// What came of a Checkpoint is written also when somebody has changed the object meanwhile, and never
// over what came of it before.
func TestConflicts(t *testing.T) {
	pod := runningPod("here", "a")
	k := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "uid-of-k", Labels: map[string]string{}}, Spec: api.Spec{Pod: "pod", Repository: "r/job", Tag: "current"}, Status: api.Status{Node: "here", PodUID: "1"}}
	cluster := world(t, k, pod).Build()
	key := client.ObjectKeyFromObject(k)
	d, events := &diary{}, record.NewFakeRecorder(10)
	var old api.Checkpoint
	r := &controller{client: cluster, direct: cluster, events: events, node: "here", now: time.Now, work: busybody{d, func() error {
		if err := cluster.Get(t.Context(), key, &old); err != nil {
			return err
		}
		labelled := old.DeepCopy()
		labelled.Labels = map[string]string{"some": "body"}
		return cluster.Update(t.Context(), labelled)
	}}}
	reconcile := func() api.Checkpoint {
		t.Helper()
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key}); err != nil {
			t.Fatal(err)
		}
		var now api.Checkpoint
		if err := cluster.Get(t.Context(), key, &now); err != nil {
			t.Fatal(err)
		}
		return now
	}
	if now := reconcile(); now.Status.Phase != api.Succeeded || now.Labels["some"] != "body" || len(events.Events) != 1 {
		t.Fatalf("%+v, %d events", now, len(events.Events))
	}
	if want := "push r/job:current {}"; !slices.Contains(d.did, want) {
		t.Errorf("it did %q", d.did)
	}
	r.client = behind{cluster, &old}
	if now := reconcile(); now.Status.Phase != api.Succeeded || len(now.Status.Conditions) != 1 {
		t.Fatalf("%+v", now.Status)
	}
}

// A Checkpoint that takes the name of one at work does not get what came of that one.
func TestReplaced(t *testing.T) {
	named := func(uid types.UID, secret string) *api.Checkpoint {
		return &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: uid}, Spec: api.Spec{Pod: "pod", Repository: "r/job", PushSecret: secret}, Status: api.Status{Node: "here", PodUID: "1"}}
	}
	for _, c := range []struct {
		name, secret string
		before       bool // the agent has not seen yet that it is replaced
	}{{name: "while it works"}, {name: "while it waits for its credentials", secret: "registry"}, {name: "an agent that was killed", before: true}} {
		fresh := named("fresh", "")
		replace := func(ctx context.Context, to client.Client) error {
			made := fresh.DeepCopy()
			err := errors.Join(to.Delete(ctx, made.DeepCopy()), to.Create(ctx, made))
			made.Status = fresh.Status
			return errors.Join(err, to.SubResource("status").Update(ctx, made))
		}
		cluster := world(t, named("uid-of-k", c.secret), runningPod("here", "a")).WithInterceptorFuncs(interceptor.Funcs{
			SubResourceUpdate: func(ctx context.Context, to client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
				err := to.SubResource(sub).Update(ctx, o, opts...)
				if o.GetUID() == "uid-of-k" && err == nil {
					err = replace(ctx, to)
				}
				return err
			},
		}).Build()
		events := record.NewFakeRecorder(10)
		r := &controller{client: cluster, direct: cluster, events: events, node: "here", work: &diary{}, now: time.Now}
		if c.before {
			if err := replace(t.Context(), cluster); err != nil {
				t.Fatal(err)
			}
			old := named("uid-of-k", "")
			old.Status.Phase = api.Running
			r.client = behind{cluster, old}
		}
		_, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(fresh)})
		var now api.Checkpoint
		if err := errors.Join(err, cluster.Get(t.Context(), client.ObjectKeyFromObject(fresh), &now)); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if now.UID != "fresh" || now.Status.Phase != "" || now.Status.Restarts > 0 || len(events.Events) > 0 {
			t.Errorf("%s: the other one is %+v, %d events", c.name, now.Status, len(events.Events))
		}
	}
}

// ending is a worker whose agent ends while it works.
type ending struct {
	*diary
	end func()
}

func (e ending) Checkpoint(ctx context.Context, w node.Wanted) ([]node.Captured, error) {
	e.end()
	return e.diary.Checkpoint(ctx, w)
}

// What an agent leaves at its end, the next one goes on with: it is not over, and no image is removed.
func TestEnds(t *testing.T) {
	for _, c := range []struct {
		fails string
		then  []string // does the next one
	}{
		{"checkpoint ns/pod a", []string{"look for " + ours, "checkpoint ns/pod a", "push r/job:k {}", "discard 1"}},
		{"push r/job:k {}", []string{"look for " + ours, "push r/job:k {}", "discard 1"}},
		{"", nil},
	} {
		pod := runningPod("here", "a")
		k := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "uid-of-k"}, Spec: api.Spec{Pod: "pod", Repository: "r/job"}, Status: api.Status{Node: "here", PodUID: "1"}}
		cluster := world(t, k, pod).Build()
		key := client.ObjectKeyFromObject(k)
		ctx, end := context.WithCancel(t.Context())
		d := &diary{fails: c.fails}
		r := &controller{client: cluster, direct: cluster, events: record.NewFakeRecorder(10), node: "here", work: ending{d, end}, now: time.Now}
		_, err := r.Reconcile(ctx, ctrl.Request{NamespacedName: key})
		if err := cluster.Get(t.Context(), key, k); err != nil {
			t.Fatal(err)
		}
		if want := map[bool]api.Phase{true: api.Succeeded, false: api.Running}[c.then == nil]; k.Status.Phase != want || (err != nil) != (c.then != nil) || len(k.Status.Conditions) > 0 != (c.then == nil) {
			t.Errorf("%q: it is %+v, error %v", c.fails, k.Status, err)
		}
		next := &diary{}
		if strings.HasPrefix(c.fails, "push") {
			next.taken = []string{"1"}
			if slices.Contains(d.did, "discard 1") {
				t.Errorf("%q: it did %q", c.fails, d.did)
			}
		}
		r = &controller{client: cluster, direct: cluster, events: record.NewFakeRecorder(10), node: "here", work: next, now: time.Now}
		_, err = r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key})
		if err := errors.Join(err, cluster.Get(t.Context(), key, k)); err != nil {
			t.Fatal(err)
		}
		if restarts := int32(min(len(c.then), 1)); k.Status.Phase != api.Succeeded || k.Status.Restarts != restarts || len(k.Status.Containers) != 1 || !slices.Equal(next.did, c.then) {
			t.Errorf("%q: then it is %+v, and the next agent did %q", c.fails, k.Status, next.did)
		}
	}
}

// Nothing is taken before what another agent has left paused runs on: it would stay so.
func TestRecovering(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k"}, Spec: api.Spec{Pod: "pod"}, Status: api.Status{Node: "here", Phase: api.Running}}
		cluster := world(t, k).Build()
		d := &diary{}
		r := &controller{client: cluster, direct: cluster, events: record.NewFakeRecorder(10), node: "here", work: d, now: time.Now}
		r.recovering.Add(1)
		go func() {
			if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(k)}); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		if len(d.did) > 0 {
			t.Errorf("meanwhile it did %q", d.did)
		}
		r.recovering.Done()
		synctest.Wait()
		if len(d.did) == 0 {
			t.Error("then it did nothing")
		}
	})
}

// An agent removes what another one has pushed and not removed, and what it could not push of a pod
// that runs on, and nothing else.
func TestSweep(t *testing.T) {
	of := func(name string, uid types.UID, phase api.Phase) *api.Checkpoint {
		return &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: uid}, Status: api.Status{Phase: phase}}
	}
	runsOn := of("d", "d", api.Failed)
	runsOn.Spec.Pod, runsOn.Status.PodUID = "pod", "1"
	cluster := world(t, of("a", "a", api.Succeeded), of("b", "b", api.Failed), of("c", "c", api.Running), runsOn, runningPod("here", "a")).Build()
	d := &diary{taken: []string{"a:1", "aa:1", "b:1", "c:1", "d:1"}}
	r := &controller{direct: cluster, work: d}
	if err := r.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if want := []string{"look for " + allImages, "discard " + allImages + "a:1", "discard " + allImages + "d:1"}; !slices.Equal(d.did, want) {
		t.Errorf("it did %q, want %q", d.did, want)
	}
}

// What is done is seen meanwhile: a container that is checkpointed is being pushed.
func TestStages(t *testing.T) {
	pod := runningPod("here", "a")
	k := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "uid-of-k"}, Spec: api.Spec{Pod: "pod", Repository: "r/job"}, Status: api.Status{Node: "here", PodUID: "1"}}
	cluster := world(t, k, pod).Build()
	var seen []string
	now := time.Now()
	look := func() error {
		err := cluster.Get(t.Context(), client.ObjectKeyFromObject(k), k)
		seen = append(seen, fmt.Sprint(k.Status.Stage, k.Status.Bytes, " ", k.Status.Percent))
		return err
	}
	r := &controller{client: cluster, direct: cluster, events: record.NewFakeRecorder(10), node: "here", now: func() time.Time { return now }}
	r.work = busybody{&diary{}, func() error {
		err := look()
		r.checkpointed(t.Context(), "another", 5)
		err = errors.Join(err, look())
		far := r.pushing(t.Context(), k)
		now = now.Add(percentEvery)
		far(1, 3) // of what is made before all is
		r.checkpointed(t.Context(), "1", 5)
		err = errors.Join(err, look())
		far(1, 3) // at once
		now = now.Add(percentEvery)
		far(2, 3)
		return errors.Join(err, look())
	}}
	_, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(k)})
	if err := errors.Join(err, look()); err != nil {
		t.Fatal(err)
	}
	r.checkpointed(t.Context(), "1", 5) // by somebody else
	if err := look(); err != nil {
		t.Fatal(err)
	}
	if want := []string{"Checkpointing0 0", "Checkpointing0 0", "Pushing5 0", "Pushing5 66", "2 0", "2 0"}; !slices.Equal(seen, want) {
		t.Errorf("seen were %q, want %q", seen, want)
	}
}

// slow is a worker whose checkpoints of a namespace take until something is there.
type slow struct {
	*diary
	namespace     string
	begun, goesOn chan struct{}
}

func (s slow) Checkpoint(ctx context.Context, w node.Wanted) ([]node.Captured, error) {
	if w.Namespace == s.namespace {
		close(s.begun)
		<-s.goesOn
	}
	return []node.Captured{{Name: "a", Image: w.Image, Push: &node.Pushed{Image: w.Target}}}, nil
}

// A registry that does not answer holds up the namespace that named it, and no other.
func TestEachNamespaceHasATurn(t *testing.T) {
	var objects []client.Object
	for _, name := range []string{"first/k", "first/later", "second/k"} {
		namespace, name, _ := strings.Cut(name, "/")
		objects = append(objects, &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: api.Spec{Pod: "pod-" + name, Repository: "r/job"}, Status: api.Status{Node: "here"}})
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "pod-" + name}, Spec: corev1.PodSpec{NodeName: "here", Containers: []corev1.Container{{Name: "a"}}}}
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "a", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
		objects = append(objects, pod)
	}
	cluster := world(t, objects...).Build()
	w := slow{&diary{}, "first", make(chan struct{}), make(chan struct{})}
	r := &controller{client: cluster, direct: cluster, events: record.NewFakeRecorder(10), node: "here", work: w, now: time.Now}
	reconcile := func(namespace, name string) (again bool, phase api.Phase) {
		t.Helper()
		key := client.ObjectKey{Namespace: namespace, Name: name}
		result, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key})
		var k api.Checkpoint
		if err := errors.Join(err, cluster.Get(t.Context(), key, &k)); err != nil {
			t.Error(err)
		}
		return result.RequeueAfter > 0, k.Status.Phase
	}
	done := make(chan api.Phase)
	go func() {
		_, phase := reconcile("first", "k")
		done <- phase
	}()
	<-w.begun
	if again, phase := reconcile("second", "k"); again || phase != api.Succeeded {
		t.Errorf("another namespace's is %q, again %t", phase, again)
	}
	if again, phase := reconcile("first", "later"); !again || phase != "" {
		t.Errorf("the next one of the namespace is %q, again %t", phase, again)
	}
	close(w.goesOn)
	if phase := <-done; phase != api.Succeeded {
		t.Errorf("the first is %q", phase)
	}
	r.work = slow{&diary{}, "", nil, nil}
	if again, phase := reconcile("first", "later"); again || phase != api.Succeeded {
		t.Errorf("then it is %q, again %t", phase, again)
	}
}

// What came of a Checkpoint is written also if the API server was away for a moment, and what it
// refuses is not asked again.
func TestAwayForAMoment(t *testing.T) {
	usual := patience
	patience.Duration = time.Millisecond
	defer func() { patience = usual }()
	for _, c := range []struct {
		name  string
		err   error
		times int // that the server answers so when it is told what came of it
		phase api.Phase
		asked int
	}{
		{"not there", syscall.ECONNREFUSED, 5, api.Succeeded, 6},
		{"not ready", apierrors.NewServiceUnavailable("it starts"), 5, api.Succeeded, 6},
		{"never there", syscall.ECONNREFUSED, 1000, api.Running, patience.Steps},
		{"refused", apierrors.NewForbidden(corev1.Resource("checkpoints"), "k", nil), 1000, api.Running, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := runningPod("here", "a")
			k := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "uid-of-k"}, Spec: api.Spec{Pod: "pod", Repository: "r/job", PushSecret: "registry"}, Status: api.Status{Node: "here", PodUID: "1"}}
			var one sync.Mutex // the Checkpoint is looked at by the side
			told, reads, polls := 0, 0, 0
			away := func(n *int) error {
				if *n++; *n <= c.times && c.times < 1000 {
					return c.err
				}
				return nil
			}
			cluster := world(t, k, pod).WithInterceptorFuncs(interceptor.Funcs{
				SubResourceUpdate: func(ctx context.Context, to client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
					one.Lock()
					defer one.Unlock()
					if o.(*api.Checkpoint).Status.Phase.Over() {
						if told++; told <= c.times {
							return c.err
						}
					}
					return handsOver(ctx, to, sub, o, opts...)
				},
				Get: func(ctx context.Context, from client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
					one.Lock()
					defer one.Unlock()
					if _, ok := o.(*corev1.Pod); ok {
						if err := away(&reads); err != nil {
							return err
						}
					} else if reads > 0 && told == 0 { // it waits for its credentials
						if err := away(&polls); err != nil {
							return err
						}
					}
					return from.Get(ctx, key, o, opts...)
				},
			}).Build()
			r := &controller{client: cluster, direct: cluster, events: record.NewFakeRecorder(10), node: "here", work: &diary{}, now: time.Now}
			key := client.ObjectKeyFromObject(k)
			_, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key})
			if (err == nil) != (c.phase == api.Succeeded) || err != nil && !errors.Is(err, c.err) {
				t.Errorf("error %v", err)
			}
			if err := cluster.Get(t.Context(), key, k); err != nil {
				t.Fatal(err)
			}
			if k.Status.Phase != c.phase || told != c.asked {
				t.Errorf("it is %q, and the server was told %d times, want %q and %d", k.Status.Phase, told, c.phase, c.asked)
			}
		})
	}
}

// teller is a worker whose pushes tell how far they are.
type teller struct {
	*diary
	tells func(progress func(done, total uint64))
}

func (p teller) Push(ctx context.Context, w node.Wanted, made []node.Captured) {
	p.tells(w.Progress)
	p.diary.Push(ctx, w, made)
}

// An agent that pushes what another one has left says no less than that one said.
func TestPercentAfterARestart(t *testing.T) {
	k := &api.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "uid-of-k"}, Spec: api.Spec{Pod: "pod", Repository: "r/job"},
		Status: api.Status{Node: "here", PodUID: "1", Phase: api.Running, Stage: api.Pushing, Percent: 60},
	}
	cluster := world(t, k).Build()
	var seen []int32
	now := time.Now()
	r := &controller{client: cluster, direct: cluster, events: record.NewFakeRecorder(10), node: "here", now: func() time.Time { return now }}
	r.work = teller{&diary{taken: []string{"1"}}, func(far func(done, total uint64)) {
		for done := range uint64(3) {
			now = now.Add(percentEvery)
			far(done+1, 4)
			if err := cluster.Get(t.Context(), client.ObjectKeyFromObject(k), k); err != nil {
				t.Fatal(err)
			}
			seen = append(seen, k.Status.Percent)
		}
	}}
	if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(k)}); err != nil {
		t.Fatal(err)
	}
	if want := []int32{60, 60, 75}; !slices.Equal(seen, want) {
		t.Errorf("seen were %d, want %d", seen, want)
	}
}
