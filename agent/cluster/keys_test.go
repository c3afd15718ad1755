// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// The keys of a node that is gone count for a time, and for ever if it comes back.
func TestFormerNodes(t *testing.T) {
	here := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}}
	k := newTest(t, here.DeepCopy(), &api.NodeKey{ObjectMeta: metav1.ObjectMeta{Name: "here"}})
	r := &formerNodes{k.cluster, time.Hour}
	look := func() (there bool, again time.Duration) {
		t.Helper()
		result, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "here"}})
		k.must(err)
		var now api.NodeKey
		err = k.client.Get(t.Context(), client.ObjectKey{Name: "here"}, &now)
		k.must(client.IgnoreNotFound(err))
		return err == nil, result.RequeueAfter
	}
	expect := func(there bool, again time.Duration) {
		t.Helper()
		if is, next := look(); is != there || next != again {
			t.Errorf("after %s it is there: %t, again in %s; want %t, %s", k.clock.Sub(start), is, next, there, again)
		}
	}
	expect(true, 0)
	k.must(k.client.Delete(t.Context(), here.DeepCopy()))
	expect(true, time.Hour)
	k.clock = k.clock.Add(50 * time.Minute)
	expect(true, 10*time.Minute)
	k.must(k.client.Create(t.Context(), here.DeepCopy()))
	expect(true, 0)
	k.clock = k.clock.Add(50 * time.Minute)
	k.must(k.client.Delete(t.Context(), here.DeepCopy()))
	expect(true, time.Hour)
	k.clock = k.clock.Add(time.Hour)
	expect(false, 0)
}
