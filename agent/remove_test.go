// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// All nodes uninstall gpuckpt, restarting containerd if that is what they did, before the wait is over.
// Without the DaemonSet there is nothing to wait for.
func TestFromNodes(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := appsv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	named := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "ns", Name: name} }
	d := &appsv1.DaemonSet{ObjectMeta: named("gpuckpt-node"), Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 2, NumberReady: 2, UpdatedNumberScheduled: 1}}
	d.Spec.Template.Spec.InitContainers = []corev1.Container{{Name: "install", Args: []string{"install", "--root=/host", "--restart", "--settings=/settings"}}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(d).WithObjects(d, &appsv1.DaemonSet{ObjectMeta: named("gpuckpt-agent")}).Build()
	soon, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := fromNodes(soon, c, "ns"); err == nil {
		t.Error("it does not wait for the second node")
	}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(d), d); err != nil {
		t.Fatal(err)
	}
	if i := d.Spec.Template.Spec.InitContainers[0]; i.Name != "uninstall" || !slices.Equal(i.Args, []string{"uninstall", "--root=/host", "--restart"}) {
		t.Errorf("%+v", i)
	}
	if u := d.Spec.UpdateStrategy.RollingUpdate; u == nil || u.MaxUnavailable.String() != "100%" {
		t.Errorf("a node that is not done keeps others waiting: %+v", u)
	}
	d.Status.UpdatedNumberScheduled = 2
	if err := c.Status().Update(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := fromNodes(t.Context(), c, "ns"); err != nil {
			t.Error(err)
		}
		err := c.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: "gpuckpt-agent"}, &appsv1.DaemonSet{})
		if !apierrors.IsNotFound(err) {
			t.Errorf("the agents: %v", err)
		}
		if err := c.Delete(t.Context(), d.DeepCopy()); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
	}
}
