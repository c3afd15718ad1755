// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// aNode returns a Node of which nothing is read but that it is there.
func aNode() *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}}
}

// formerNodes deletes the keys of nodes that the cluster has no more. What such a node has checkpointed
// before it was drained goes on elsewhere, so its keys are trusted for a time.
type formerNodes struct {
	cluster
	keep time.Duration
}

// Reconcile is called for each change of a NodeKey, and when a node comes or goes.
func (r *formerNodes) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var k api.NodeKey
	if err := r.direct.Get(ctx, request.NamespacedName, &k); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	err := r.direct.Get(ctx, request.NamespacedName, aNode())
	switch {
	case client.IgnoreNotFound(err) != nil:
		return ctrl.Result{}, err
	case err == nil && k.Status.Gone == nil:
		return ctrl.Result{}, nil
	case err == nil:
		k.Status.Gone = nil
		return ctrl.Result{}, r.client.Status().Update(ctx, &k)
	case k.Status.Gone == nil:
		k.Status.Gone = new(metav1.NewTime(r.now()))
		if err := r.client.Status().Update(ctx, &k); err != nil {
			return ctrl.Result{}, err
		}
	}
	if left := r.keep - r.now().Sub(k.Status.Gone.Time); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	err = r.client.Delete(ctx, &k, client.Preconditions{UID: &k.UID, ResourceVersion: &k.ResourceVersion})
	if apierrors.IsConflict(err) { // the node is back
		return ctrl.Result{Requeue: true}, nil //nolint:staticcheck // at once
	}
	return ctrl.Result{}, client.IgnoreNotFound(err)
}
