// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// start is when the tests' clock begins.
var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// test is a cluster in memory, with a clock that the test sets.
type test struct {
	*testing.T
	cluster

	clock  time.Time
	events *record.FakeRecorder
}

func newTest(t *testing.T, objects ...client.Object) *test {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(api.AddTo(scheme), corev1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	k := &test{T: t, clock: start, events: record.NewFakeRecorder(100)}
	c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&api.Checkpoint{}, &api.Migration{}, &api.CheckpointSchedule{}, &api.NodeKey{}, &corev1.Pod{}).WithObjects(objects...).Build()
	k.cluster = cluster{client: c, direct: c, events: k.events, now: func() time.Time { return k.clock }}
	return k
}

// get reads an object, and reports whether it is there.
func (k *test) get(name string, to client.Object) bool {
	k.Helper()
	err := k.client.Get(k.Context(), client.ObjectKey{Namespace: "ns", Name: name}, to)
	if client.IgnoreNotFound(err) != nil {
		k.Fatal(err)
	}
	return err == nil
}

// reconcile has a controller look at an object by its name.
func (k *test) reconcile(by reconcile.Reconciler, name string) ctrl.Result {
	k.Helper()
	result, err := by.Reconcile(k.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: name}})
	k.must(err)
	return result
}

func (k *test) must(err error) {
	k.Helper()
	if err != nil {
		k.Fatal(err)
	}
}

func running(name, nodeName string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: "12345678-9", Labels: map[string]string{"app": "a"}},
		Spec: corev1.PodSpec{
			NodeName: nodeName, NodeSelector: map[string]string{"gpu": "h200"}, Containers: []corev1.Container{{Name: "main", Image: "app"}},
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpExists}}}},
			}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

// step has a Migration reconciled by a controller that knows nothing, as one that was restarted.
func (k *test) step() api.Migration {
	k.Helper()
	r := &migrations{k.cluster}
	for range 3 { // more often than there is a reason to
		k.reconcile(r, "m")
		k.reconcile(&heirs{k.cluster}, "m")
	}
	var m api.Migration
	k.get("m", &m)
	return m
}

// checkpointed ends the Checkpoint.
func (k *test) checkpointed(phase api.Phase) {
	k.Helper()
	var c api.Checkpoint
	if !k.get("m", &c) {
		k.Fatal("there is no Checkpoint")
	}
	now := metav1.NewTime(k.clock)
	c.Status.Phase, c.Status.CompletionTime = phase, &now
	if phase == api.Succeeded {
		c.Status.Containers = []api.Container{{Name: "main", Image: "r/job:m", Digest: "sha256:1"}}
	} else {
		c.Status.Conditions = []metav1.Condition{{Type: api.HasFailed, Status: metav1.ConditionTrue, Reason: "CheckpointFailed", Message: "broken", LastTransitionTime: now}}
	}
	k.must(k.client.Status().Update(k.Context(), &c))
}

// restored has the new pod be scheduled and ready.
func (k *test) restored() {
	k.Helper()
	var p corev1.Pod
	if !k.get("m", &p) || len(p.Spec.SchedulingGates) > 0 {
		k.Fatalf("the new pod is %+v", p.Spec)
	}
	p.Spec.NodeName = "there"
	k.must(k.client.Update(k.Context(), &p))
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	k.must(k.client.Status().Update(k.Context(), &p))
}

func migration(change func(*api.MigrationSpec)) *api.Migration {
	m := &api.Migration{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m", UID: "mig"}, Spec: api.MigrationSpec{Pod: "old", Repository: "r/job", PushSecret: "s"}}
	if change != nil {
		change(&m.Spec)
	}
	return m
}

// A Migration makes a gated pod, checkpoints, opens the gate, and deletes the old pod when the new one
// is ready, not before. Each step is done once, however often it is looked at.
func TestMigration(t *testing.T) {
	k := newTest(t, running("old", "here"), migration(func(s *api.MigrationSpec) { s.NodeSelector = map[string]string{"zone": "b"} }))
	if m := k.step(); m.Status.Phase != api.Running || m.Status.From != "here" || m.Status.NewPod != "m" {
		t.Fatalf("%+v", m.Status)
	}
	var fresh corev1.Pod
	if !k.get("m", &fresh) || len(fresh.Spec.SchedulingGates) != 1 || fresh.Spec.NodeName != "" || fresh.Annotations[api.RestoreAnnotation] != "true" || fresh.Labels["app"] != "a" {
		t.Fatalf("the new pod is %+v", fresh)
	}
	if want := map[string]string{"gpu": "h200", "zone": "b"}; !reflect.DeepEqual(fresh.Spec.NodeSelector, want) {
		t.Errorf("it goes to %v", fresh.Spec.NodeSelector)
	}
	term := fresh.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0]
	if f := term.MatchFields[0]; len(term.MatchExpressions) != 1 || f.Operator != corev1.NodeSelectorOpNotIn || f.Values[0] != "here" {
		t.Errorf("it goes to %+v", term)
	}
	if len(fresh.Spec.ImagePullSecrets) != 1 || len(fresh.OwnerReferences) != 1 {
		t.Errorf("%+v, %+v", fresh.Spec.ImagePullSecrets, fresh.OwnerReferences)
	}
	k.checkpointed(api.Succeeded)
	k.step()
	k.get("m", &fresh)
	if fresh.Spec.Containers[0].Image != "r/job:m@sha256:1" {
		t.Errorf("its image is %s", fresh.Spec.Containers[0].Image)
	}
	if !k.get("old", &corev1.Pod{}) {
		t.Fatal("the old pod is gone before the new one is ready")
	}
	k.must(k.client.Delete(t.Context(), &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m"}})) // it has done its part
	k.step()
	k.restored()
	m := k.step()
	if k.get("m", &api.Checkpoint{}) {
		t.Error("the pod is checkpointed again")
	}
	if m.Status.Phase != api.Succeeded || m.Status.To != "there" || k.get("old", &corev1.Pod{}) || len(k.events.Events) != 1 {
		t.Fatalf("%+v", m.Status)
	}
	for _, kind := range []string{api.Checkpointed, api.Restored, api.Complete} {
		if !meta.IsStatusConditionTrue(m.Status.Conditions, kind) {
			t.Errorf("not %s: %+v", kind, m.Status.Conditions)
		}
	}
	if k.get("m", &fresh); len(fresh.OwnerReferences) > 0 {
		t.Errorf("the new pod goes with the Migration: %+v", fresh.OwnerReferences)
	}
}

// With DeleteFirst the new pod waits until the old one is gone.
func TestMigrationDeletesFirst(t *testing.T) {
	k := newTest(t, running("old", "here"), migration(func(s *api.MigrationSpec) { s.NodeName, s.DeleteFirst = "there", true }))
	var old, fresh corev1.Pod
	k.get("old", &old)
	old.Finalizers = []string{"t/t"} // it takes time to end
	k.must(k.client.Update(t.Context(), &old))
	k.step()
	k.checkpointed(api.Succeeded)
	k.step()
	k.get("m", &fresh)
	if k.get("old", &old); old.DeletionTimestamp == nil || len(fresh.Spec.SchedulingGates) != 1 {
		t.Fatalf("%+v, %+v", old.ObjectMeta, fresh.Spec)
	}
	// Who deletes the Checkpoint, or the Migration, deletes not the only pod.
	k.must(k.client.Delete(t.Context(), &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m"}}))
	if m := k.step(); m.Status.Phase != api.Running || len(fresh.OwnerReferences) > 0 {
		t.Errorf("%+v, %+v", m.Status, fresh.ObjectMeta)
	}
	old.Finalizers = nil
	k.must(k.client.Update(t.Context(), &old))
	k.reconcile(&heirs{k.cluster}, "m")
	if k.get("m", &fresh); gated(&fresh) || fresh.Spec.Containers[0].Image != "r/job:m@sha256:1" {
		t.Errorf("it waits for the Migration: %+v", fresh.Spec)
	}
	k.step()
	// A restore that fails now leaves the pod: there is no other.
	k.clock = k.clock.Add(time.Hour)
	if m := k.step(); m.Status.Phase != api.Failed || !k.get("m", &fresh) || len(fresh.OwnerReferences) > 0 {
		t.Fatalf("%+v, %+v", m.Status, fresh.ObjectMeta)
	}
}

// A Migration that is deleted before its controller has deleted the old pod leaves no pod with a gate; one that is
// deleted later leaves the only pod.
func TestMigrationDeleted(t *testing.T) {
	for _, c := range []struct {
		name               string
		taken, ends, stays bool
	}{
		{name: "before the checkpoint, and what it has made is left"},
		{name: "before the old pod", taken: true},
		{name: "when the old pod ends", taken: true, ends: true, stays: true},
	} {
		old := running("old", "here")
		old.Finalizers = []string{"t/t"}
		k := newTest(t, old, migration(func(s *api.MigrationSpec) { s.DeleteFirst = true }))
		k.step()
		if c.taken {
			whole := k.client
			k.client = interceptor.NewClient(k.client.(client.WithWatch), interceptor.Funcs{
				Delete: func(ctx context.Context, to client.WithWatch, o client.Object, how ...client.DeleteOption) error {
					if !c.ends { // the controller is killed here
						return apierrors.NewServiceUnavailable("test")
					}
					return to.Delete(ctx, o, how...)
				},
			})
			k.checkpointed(api.Succeeded)
			if _, err := (&migrations{k.cluster}).Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "m"}}); (err == nil) != c.ends {
				t.Fatalf("%s: %v", c.name, err)
			}
			k.client = whole
		}
		k.reconcile(&heirs{k.cluster}, "m")
		var fresh corev1.Pod
		if !k.get("m", &fresh) || !gated(&fresh) || heir(&fresh) != c.taken {
			t.Fatalf("%s: %+v", c.name, fresh)
		}
		k.must(k.client.Delete(t.Context(), migration(nil)))
		k.reconcile(&heirs{k.cluster}, "m")
		if k.get("m", &fresh) != c.stays || !k.get("old", old) || (old.DeletionTimestamp != nil) != c.ends {
			t.Errorf("%s: the new pod is %+v, the old one %+v", c.name, fresh.ObjectMeta, old.ObjectMeta)
		}
	}
}

// Of two Migrations of one pod the second one waits for the first, and begins if that fails: the pod goes on once.
func TestTwoMigrations(t *testing.T) {
	for _, first := range []api.Phase{api.Succeeded, api.Failed} {
		second := migration(nil)
		second.Name, second.UID = "second", "other"
		old := running("old", "here")
		old.Annotations = map[string]string{
			"k8s.ovn.org/pod-networks": "its address", "ovn.kubernetes.io/allocated": "true", "net.ns.ovn.kubernetes.io/ip_address": "10.0.0.1",
			"team": "a", "ovn.kubernetes.io/logical_switch": "b",
		}
		k := newTest(t, old, migration(nil), second)
		k.step()
		var fresh corev1.Pod
		if k.get("m", &fresh); fresh.Annotations["team"] != "a" || fresh.Annotations["ovn.kubernetes.io/logical_switch"] != "b" || len(fresh.Annotations) != 4 {
			t.Errorf("the new pod has the annotations %v", fresh.Annotations)
		}
		r := &migrations{k.cluster}
		k.reconcile(r, "second")
		k.get("second", second)
		if said := meta.FindStatusCondition(second.Status.Conditions, api.Waiting); said == nil || said.Reason != api.Queued || k.get("second", &corev1.Pod{}) {
			t.Errorf("it does not wait: %+v", second.Status)
		}
		if k.checkpointed(first); first == api.Succeeded {
			k.step()
			k.restored()
		}
		k.step()
		for range 3 {
			k.reconcile(r, "second")
		}
		k.get("second", second)
		if goesOn := k.get("second", &corev1.Pod{}); goesOn != (first == api.Failed) || goesOn != (second.Status.Phase == api.Running) {
			t.Errorf("after one that has %s: %+v", first, second.Status)
		}
	}
}

// A pod that is drained when its Migration has the checkpoint waits for no other one in its preStop hook.
func TestEvictedInMigration(t *testing.T) {
	old, second := running("old", "here"), migration(nil)
	old.Finalizers = []string{"t/t"}
	second.Name, second.UID = api.EvictionName(old.Name, string(old.UID)), "other"
	k := newTest(t, old, migration(nil), second)
	k.step()
	k.must(k.client.Delete(t.Context(), old))
	for _, refused := range []bool{false, true} {
		for range 3 {
			k.reconcile(&migrations{k.cluster}, second.Name)
		}
		if k.get("old", old); refused != (old.Annotations[api.Refused] != "") {
			t.Fatalf("after the checkpoint: %t, refused: %q", refused, old.Annotations[api.Refused])
		}
		if !refused {
			k.checkpointed(api.Succeeded)
			k.step()
		}
	}
	var fresh corev1.Pod
	if k.get("m", &fresh); len(fresh.OwnerReferences) > 0 {
		t.Error("the pod that goes on for one that ends goes with its Migration")
	}
	k.get(second.Name, second)
	if why := meta.FindStatusCondition(second.Status.Conditions, api.HasFailed); why == nil || why.Reason != "AlreadyMigrating" {
		t.Errorf("it says %+v", why) // not the reason of one that succeeds
	}
}

// A pod that cannot end, as on a node that is off, has its Migration say what to do. It is not deleted by force, and
// with DeleteFirst no other of its kind starts, nor is its time over when it does.
func TestMigrationOfOneThatCannotEnd(t *testing.T) {
	for _, first := range []bool{true, false} {
		k := newTest(t, running("old", "here"), migration(func(s *api.MigrationSpec) { s.DeleteFirst = first }))
		var old, fresh corev1.Pod
		k.get("old", &old)
		old.Finalizers = []string{"t/t"}
		k.must(k.client.Update(t.Context(), &old))
		k.step()
		k.checkpointed(api.Succeeded)
		if k.step(); !first {
			k.restored()
			k.step()
		}
		k.get("old", &old)
		k.clock = old.DeletionTimestamp.Add(patience - time.Second)
		if m := k.step(); meta.FindStatusCondition(m.Status.Conditions, api.Waiting) != nil {
			t.Errorf("DeleteFirst %t: it is no longer patient: %+v", first, m.Status.Conditions)
		}
		k.clock = k.clock.Add(time.Hour)
		if k.get("m", &fresh); !first { // what the new pod does by then is its own
			fresh.Status.Conditions = nil
			k.must(k.client.Status().Update(t.Context(), &fresh))
		}
		m := k.step()
		said := meta.FindStatusCondition(m.Status.Conditions, api.Waiting)
		if m.Status.Phase != api.Running || said == nil || said.Reason != "OldPodTerminating" || !strings.Contains(said.Message, "kubectl taint nodes here ") || len(k.events.Events) != 1 {
			t.Fatalf("DeleteFirst %t: %+v, and %d events", first, m.Status, len(k.events.Events))
		}
		if k.get("m", &fresh); first != gated(&fresh) {
			t.Errorf("DeleteFirst %t: the new pod has the gates %v", first, fresh.Spec.SchedulingGates)
		}
		k.get("old", &old)
		old.Finalizers = nil
		k.must(k.client.Update(t.Context(), &old))
		if k.step(); first {
			k.restored()
		}
		if m := k.step(); m.Status.Phase != api.Succeeded || meta.FindStatusCondition(m.Status.Conditions, api.Waiting) != nil {
			t.Errorf("DeleteFirst %t: %+v", first, m.Status)
		}
	}
}

// A Migration that fails leaves the old pod, and no other.
func TestMigrationFails(t *testing.T) {
	owner := func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "rs", UID: "1", Controller: new(true)}}
	}
	for _, c := range []struct {
		name, reason, says string
		pod                func(*corev1.Pod)
		spec               func(*api.MigrationSpec)
		then               func(*test)
	}{
		{name: "no pod", reason: "PodNotFound", spec: func(s *api.MigrationSpec) { s.Pod = "other" }},
		{name: "an owner", reason: "Owned", says: "ReplicaSet rs", pod: owner},
		{name: "not running", reason: "NotRunning", pod: func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }},
		{name: "there already", reason: "SameNode", spec: func(s *api.MigrationSpec) { s.NodeName = "here" }},
		{name: "its own name", reason: "NameTaken", spec: func(s *api.MigrationSpec) { s.NewPod = "old" }},
		{name: "the name of another", reason: "NameTaken", spec: func(s *api.MigrationSpec) { s.NewPod = "taken" }},
		{name: "the checkpoint fails", reason: "CheckpointFailed", says: "broken", then: func(k *test) { k.checkpointed(api.Failed) }},
		{name: "the checkpoint is of another pod of the name", reason: "PodNotFound", then: func(k *test) {
			var c api.Checkpoint
			k.get("m", &c)
			c.Status.PodUID = "recreated"
			k.must(k.client.Status().Update(k.Context(), &c))
			k.checkpointed(api.Succeeded)
		}},
		{name: "no node takes it", reason: "RestoreFailed", says: "no GPU", spec: func(s *api.MigrationSpec) { s.ReadySeconds = 5 }, then: func(k *test) {
			k.checkpointed(api.Succeeded)
			k.step()
			var p corev1.Pod
			k.get("m", &p)
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "no GPU"}}
			k.must(k.client.Status().Update(k.Context(), &p))
			k.clock = k.clock.Add(6 * time.Second)
		}},
		{name: "the restore is refused", reason: "RestoreFailed", says: "no signature", then: func(k *test) {
			k.checkpointed(api.Succeeded)
			k.step()
			var p corev1.Pod
			k.get("m", &p)
			p.Status.Phase = corev1.PodFailed
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "RunContainerError", Message: "no signature"}}}}
			k.must(k.client.Status().Update(k.Context(), &p))
		}},
		{name: "the restore of a sidecar is refused", reason: "RestoreFailed", says: "its container proxy waits: RunContainerError: no signature", then: func(k *test) {
			k.checkpointed(api.Succeeded)
			k.step()
			var p corev1.Pod
			k.get("m", &p)
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "proxy", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "RunContainerError", Message: "no signature"}}}}
			k.must(k.client.Status().Update(k.Context(), &p))
			k.clock = k.clock.Add(time.Hour)
		}},
		{name: "a policy refuses its images", reason: "NewPodRefused", says: "the images of the checkpoint: pods", then: func(k *test) {
			k.checkpointed(api.Succeeded)
			k.client = refuses{k.client}
		}},
		{name: "a policy refuses its images, before the old one goes", reason: "NewPodRefused", spec: func(s *api.MigrationSpec) { s.DeleteFirst = true }, then: func(k *test) {
			k.checkpointed(api.Succeeded)
			k.client = refuses{k.client}
		}},
		{name: "somebody deletes the new pod", reason: "NewPodDeleted", then: func(k *test) {
			k.checkpointed(api.Succeeded)
			k.step()
			k.must(k.client.Delete(k.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m"}}))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := running("old", "here")
			if c.pod != nil {
				c.pod(pod)
			}
			taken := running("taken", "there")
			taken.UID = "another"
			k := newTest(t, pod, taken, migration(c.spec))
			m := k.step()
			if c.then != nil {
				c.then(k)
				m = k.step()
			}
			said := meta.FindStatusCondition(m.Status.Conditions, api.HasFailed)
			if m.Status.Phase != api.Failed || said == nil || said.Reason != c.reason || !strings.Contains(said.Message, c.says) {
				t.Errorf("%+v", m.Status)
			}
			var old corev1.Pod
			if !k.get("old", &old) || old.DeletionTimestamp != nil || k.get("m", &corev1.Pod{}) || !k.get("taken", &old) {
				t.Errorf("the pods are not as they were: %+v", old)
			}
		})
	}
}

// A policy that keeps the old pod ends a Migration that deletes first, which takes the new pod back: nobody would know
// of it when the old one ends. Of another one both run, and it says so. What the old pod does at its end stays.
func TestOldPodMayNotBeDeleted(t *testing.T) {
	for _, first := range []bool{true, false} {
		pod := running("old", "here")
		pod.Annotations = map[string]string{api.OnDeletion: api.DoCheckpoint}
		k := newTest(t, pod, migration(func(s *api.MigrationSpec) { s.DeleteFirst = first }))
		k.client = interceptor.NewClient(k.client.(client.WithWatch), interceptor.Funcs{
			Delete: func(ctx context.Context, to client.WithWatch, o client.Object, how ...client.DeleteOption) error {
				if o.GetName() == "old" {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "old", errors.New("a policy"))
				}
				return to.Delete(ctx, o, how...)
			},
		})
		k.step()
		k.checkpointed(api.Succeeded)
		if !first {
			k.step()
			k.restored()
		}
		m, condition := k.step(), api.Waiting
		if first {
			condition = api.HasFailed
		}
		said := meta.FindStatusCondition(m.Status.Conditions, condition)
		if said == nil || said.Reason != api.OldPodRefused || !strings.Contains(said.Message, "a policy") || first == k.get("m", &corev1.Pod{}) {
			t.Errorf("DeleteFirst %t: %+v", first, m.Status)
		}
		if k.get("old", pod); pod.Annotations[api.OnDeletion] == "" {
			t.Errorf("DeleteFirst %t: the old pod is changed", first)
		}
	}
}

// Whoever else writes the status of a Migration that fails costs it neither the cause nor the end of the new pod.
func TestMigrationFailsAmongOthers(t *testing.T) {
	k := newTest(t, running("old", "here"), migration(nil))
	k.step()
	k.checkpointed(api.Succeeded)
	k.step()
	k.clock = k.clock.Add(time.Hour)
	whole := k.client
	k.client = interceptor.NewClient(k.client.(client.WithWatch), interceptor.Funcs{
		SubResourceUpdate: func(context.Context, client.Client, string, client.Object, ...client.SubResourceUpdateOption) error {
			return apierrors.NewConflict(schema.GroupResource{}, "m", errors.New("somebody else"))
		},
	})
	if _, err := (&migrations{k.cluster}).Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "m"}}); err == nil {
		t.Fatal("there is no conflict")
	}
	k.client = whole
	m := k.step()
	if said := meta.FindStatusCondition(m.Status.Conditions, api.HasFailed); said == nil || said.Reason != "RestoreFailed" || k.get("m", &corev1.Pod{}) {
		t.Errorf("%+v", m.Status)
	}
}

// A pod that ends, and cannot be made anew while it counts, is checkpointed all the same.
func TestMigrationOfOneThatEnds(t *testing.T) {
	m := migration(nil)
	m.Labels = map[string]string{api.EvictedLabel: "12345678-9"}
	k := newTest(t, running("old", "here"), m)
	k.client = refuses{k.client}
	if now := k.step(); now.Status.Phase != api.Running {
		t.Errorf("%+v", now.Status)
	}
	k.checkpointed(api.Succeeded)
	now := k.step()
	if said := meta.FindStatusCondition(now.Status.Conditions, api.HasFailed); now.Status.Phase != api.Failed || said == nil || said.Reason != api.NewPodRefused || !meta.IsStatusConditionTrue(now.Status.Conditions, api.Checkpointed) {
		t.Errorf("%+v", now.Status)
	}
}

// refuses is an API server that takes no pod, new or changed.
type refuses struct{ client.Client }

func refused(o client.Object) error {
	if _, pod := o.(*corev1.Pod); pod {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, o.GetName(), errors.New("a policy"))
	}
	return nil
}

func (r refuses) Create(ctx context.Context, o client.Object, how ...client.CreateOption) error {
	if err := refused(o); err != nil {
		return err
	}
	return r.Client.Create(ctx, o, how...)
}

func (r refuses) Update(ctx context.Context, o client.Object, how ...client.UpdateOption) error {
	if err := refused(o); err != nil {
		return err
	}
	return r.Client.Update(ctx, o, how...)
}

// An API server that does not answer ends no Migration.
func TestMigrationTriesAgain(t *testing.T) {
	k := newTest(t, running("old", "here"), migration(nil))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := &migrations{k.cluster}
	r.direct = broken{r.direct}
	if _, err := r.Reconcile(ctx, ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "m"}}); err == nil {
		t.Error("it says nothing")
	}
	if m := k.step(); m.Status.Phase != api.Running {
		t.Errorf("%+v", m.Status)
	}
}

// broken is an API server that does not answer.
type broken struct{ client.Reader }

func (broken) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return apierrors.NewServiceUnavailable("test")
}
