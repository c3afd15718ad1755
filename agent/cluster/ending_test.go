// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// A pod that ends gets what its annotations ask for, once.
func TestEnding(t *testing.T) {
	disrupted := []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "EvictionByEvictionAPI"}}
	for _, c := range []struct {
		name        string
		annotations map[string]string
		conditions  []corev1.PodCondition
		deleted     bool
		owned       bool
		phase       corev1.PodPhase
		made        string
		hook        string // its path; empty: one of the pod's namespace
	}{
		{name: "evicted", annotations: map[string]string{api.OnEviction: "checkpoint"}, conditions: disrupted, deleted: true, made: "Checkpoint"},
		{name: "its deletion may be refused", annotations: map[string]string{api.OnEviction: "checkpoint"}, conditions: disrupted},
		{name: "to go on elsewhere", annotations: map[string]string{api.OnEviction: "migrate"}, conditions: disrupted, deleted: true, made: "Migration"},
		{name: "a Deployment's", annotations: map[string]string{api.OnEviction: "migrate"}, conditions: disrupted, deleted: true, owned: true, made: "Checkpoint"},
		{name: "deleted", annotations: map[string]string{api.OnEviction: "checkpoint"}, deleted: true},
		{name: "deleted, and wants it", annotations: map[string]string{api.OnDeletion: "checkpoint"}, deleted: true, made: "Checkpoint"},
		{name: "evicted is deleted, too", annotations: map[string]string{api.OnDeletion: "checkpoint"}, conditions: disrupted, deleted: true, made: "Checkpoint"},
		{name: "runs on", annotations: map[string]string{api.OnEviction: "checkpoint", api.OnDeletion: "checkpoint"}},
		{name: "at its end", annotations: map[string]string{api.OnDeletion: "checkpoint"}, deleted: true, phase: corev1.PodSucceeded},
		{name: "a hook of its own", annotations: map[string]string{api.OnDeletion: "checkpoint"}, deleted: true, made: "Checkpoint", hook: "/checkpoint/ns/job"},
		{name: "a hook of another namespace", annotations: map[string]string{api.OnDeletion: "checkpoint"}, deleted: true, made: "Checkpoint", hook: "/checkpoint/nsx"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := running("job", "here")
			pod.Annotations = map[string]string{api.Repository: "r/job", api.Tag: "current", api.PushSecret: "s"}
			maps.Copy(pod.Annotations, c.annotations)
			pod.Status.Conditions = c.conditions
			if c.phase != "" {
				pod.Status.Phase = c.phase
			}
			hook := &corev1.HTTPGetAction{Path: cmp.Or(c.hook, "/checkpoint/ns")}
			pod.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{HTTPGet: hook}}
			if c.owned {
				pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "rs", UID: "1", Controller: new(true)}}
			}
			if c.deleted {
				at := metav1.NewTime(start.Add(2 * time.Second))
				pod.DeletionTimestamp, pod.Finalizers = &at, []string{"t/t"}
			}
			k := newTest(t, pod)
			for range 2 {
				if _, err := (&endings{k.cluster}).Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(pod)}); err != nil {
					t.Fatal(err)
				}
			}
			var checkpoint api.Checkpoint
			var migration api.Migration
			made := ""
			if k.get("job-12345678", &checkpoint) {
				made = "Checkpoint"
				if s := checkpoint.Spec; s.Pod != "job" || s.Repository != "r/job" || s.Tag != "current" || s.PushSecret != "s" || s.TimeoutSeconds != 2 {
					t.Errorf("%+v", s)
				}
			}
			if k.get("job-12345678", &migration) {
				made += "Migration"
				if s := migration.Spec; s.Pod != "job" || s.Repository != "r/job" || migration.Labels[api.EvictedLabel] != "12345678-9" {
					t.Errorf("%+v", migration)
				}
			}
			if made != c.made {
				t.Errorf("it made %q, want %q", made, c.made)
			}
			if want := min(len(c.made), 1); len(k.events.Events) != want {
				t.Errorf("%d events, want %d", len(k.events.Events), want)
			} else if want == 1 {
				if said := <-k.events.Events; strings.Contains(said, "has no preStop hook with the path /checkpoint/ns") != (hook.Path == "/checkpoint/nsx") {
					t.Error(said)
				}
			}
		})
	}
}

// A pod that ends says that it may not be checkpointed, whether its Checkpoint, its Migration or the
// Checkpoint of that is refused: its preStop hook waits for no more.
func TestEndingRefused(t *testing.T) {
	for _, c := range []struct {
		what, refused string
		says          bool
	}{
		{"checkpoint", "Checkpoint", true},
		{"migrate", "Migration", true},
		{"migrate", "Checkpoint", true},
		{"checkpoint", "Migration", false},
	} {
		pod := running("job", "here")
		pod.Annotations = map[string]string{api.OnEviction: c.what, api.Repository: "r/job"}
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}
		pod.DeletionTimestamp, pod.Finalizers = new(metav1.NewTime(start.Add(time.Minute))), []string{"t/t"}
		k := newTest(t, pod)
		k.client = interceptor.NewClient(k.client.(client.WithWatch), interceptor.Funcs{
			Create: func(ctx context.Context, to client.WithWatch, o client.Object, opts ...client.CreateOption) error {
				_, checkpoint := o.(*api.Checkpoint)
				_, migration := o.(*api.Migration)
				if checkpoint && c.refused == "Checkpoint" || migration && c.refused == "Migration" {
					return apierrors.NewForbidden(schema.GroupResource{}, o.GetName(), errors.New("no such repository"))
				}
				return to.Create(ctx, o, opts...)
			},
		})
		for range 3 {
			_, err := (&endings{k.cluster}).Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(pod)})
			k.must(err)
			_, err = (&migrations{k.cluster}).Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "job-12345678"}})
			k.must(err)
		}
		k.get("job", pod)
		if why := pod.Annotations[api.Refused]; strings.Contains(why, "no such repository") != c.says {
			t.Errorf("%s, and a %s is refused: the pod says %q", c.what, c.refused, why)
		}
	}
}
