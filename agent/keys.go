// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// again is how often a node's key is looked at: it may have been replaced. soon is when it is looked at
// after a first error: gpuckpt may just be being installed, and no node restores what this one has
// checkpointed before its key is known. The next tries come later and later.
const again, soon = time.Minute, time.Second

// ring is where a node keeps keys; a test has its own.
type ring interface {
	// Key returns the public half of the key that signs the node's checkpoints.
	Key(ctx context.Context) (string, error)
	// Trust has the node trust keys, by the names of their nodes, and no others of the cluster's.
	Trust(keys map[string][]string) error
}

// keys makes the node's key known to the cluster, and those of all nodes count on this one.
type keys struct {
	client client.Client
	direct client.Reader
	node   string
	ring   ring
}

// Start makes the node's key known, again when it is another.
func (r *keys) Start(ctx context.Context) error {
	for wait := soon; ctx.Err() == nil; {
		next := again
		if err := r.publish(ctx); err == nil {
			wait = soon
		} else if ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "make the node's key known to the cluster", "next", wait)
			next, wait = wait, min(2*wait, again)
		}
		select {
		case <-ctx.Done():
		case <-time.After(next):
		}
	}
	return nil
}

// publish adds the node's key to its earlier ones.
func (r *keys) publish(ctx context.Context) error {
	key, err := r.ring.Key(ctx)
	if err != nil {
		return err
	}
	k := api.NodeKey{ObjectMeta: metav1.ObjectMeta{Name: r.node}}
	err = r.direct.Get(ctx, client.ObjectKeyFromObject(&k), &k)
	if apierrors.IsNotFound(err) {
		k.Spec.Keys = []string{key}
		return r.client.Create(ctx, &k)
	}
	if err != nil || slices.Contains(k.Spec.Keys, key) {
		return err
	}
	k.Spec.Keys = append(k.Spec.Keys, key)
	k.Spec.Keys = k.Spec.Keys[max(0, len(k.Spec.Keys)-api.MaxKeys):]
	return r.client.Update(ctx, &k)
}

// Reconcile is called for each change of the key of a node.
func (r *keys) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	var all api.NodeKeyList
	if err := r.client.List(ctx, &all); err != nil {
		return ctrl.Result{}, fmt.Errorf("list the keys of the nodes: %w", err)
	}
	found := map[string][]string{}
	for _, k := range all.Items {
		if k.DeletionTimestamp == nil {
			found[k.Name] = k.Spec.Keys
		}
	}
	return ctrl.Result{}, r.ring.Trust(found)
}
