// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package turns shares workers among namespaces: what one namespace has at work, however long it takes,
// keeps only others of that namespace waiting.
package turns

import (
	"context"
	"sync"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	// AtOnce is how many namespaces have an object at work.
	AtOnce = 16
	// Next is how long until an object is looked at again whose namespace has another one at work.
	Next = time.Second
)

// Turns are those of all namespaces. Each has one.
type Turns struct{ busy sync.Map }

// Take takes a namespace's turn; ok is false if it is taken.
func (t *Turns) Take(namespace string) (end func(), ok bool) {
	_, busy := t.busy.LoadOrStore(namespace, true)
	return func() { t.busy.Delete(namespace) }, !busy
}

// Share has each namespace take its turn at a reconciler.
func (t *Turns) Share(r reconcile.Reconciler) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
		end, ok := t.Take(request.Namespace)
		if !ok {
			return ctrl.Result{RequeueAfter: Next}, nil
		}
		defer end()
		return r.Reconcile(ctx, request)
	})
}
