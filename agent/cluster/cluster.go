// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cluster is what one program does for all nodes: Migrations, schedules, replicas that continue
// from one checkpoint, the checkpoints of pods at their end, the images of Checkpoints that are deleted,
// and the keys of nodes that are gone. It makes Checkpoint objects and pods; the agents of the nodes do
// the checkpoints.
package cluster

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	runner "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpuckpt/gpuckpt/agent/api"
	"github.com/gpuckpt/gpuckpt/agent/turns"
)

// cluster is what all of them work with.
type cluster struct {
	client client.Client
	// direct is not behind: what is decided on the state of a pod is decided on the newest.
	direct client.Reader
	events record.EventRecorder
	now    func() time.Time
}

// refuse notes that a pod ends without a checkpoint, which its preStop hook waits for.
func (c cluster) refuse(ctx context.Context, pod *corev1.Pod, why string) error {
	metav1.SetMetaDataAnnotation(&pod.ObjectMeta, api.Refused, why)
	return client.IgnoreNotFound(c.client.Update(ctx, pod))
}

// Options are what it is told.
type Options struct {
	PlainHTTP bool   // with registries
	Namespace string // of the agents; empty: they are anywhere
	// KeepKeys is how long the keys of a node that is gone are trusted.
	KeepKeys time.Duration
}

// Add has a manager run all of it.
func Add(m manager.Manager, o Options) error {
	c := cluster{
		client: m.GetClient(), direct: m.GetAPIReader(), now: time.Now,
		events: m.GetEventRecorderFor("gpuckpt"), //nolint:staticcheck // the newer one has no messages
	}
	own := handler.EnqueueRequestForOwner(m.GetScheme(), m.GetRESTMapper(), &api.Migration{})
	bySchedule := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []ctrl.Request {
		name := o.GetLabels()[api.ScheduleLabel]
		if name == "" {
			return nil
		}
		return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: name}}}
	})
	ends := builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool {
		return o.GetAnnotations()[api.OnEviction] != "" || o.GetAnnotations()[api.OnDeletion] != ""
	}))
	namespace := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []ctrl.Request {
		return []ctrl.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace()}}}
	})
	comesOrGoes := builder.WithPredicates(predicate.Funcs{UpdateFunc: func(event.UpdateEvent) bool { return false }})
	build := func(name string) *ctrl.Builder {
		return ctrl.NewControllerManagedBy(m).Named(name).WithOptions(runner.Options{MaxConcurrentReconciles: turns.AtOnce})
	}
	share, move := func(r reconcile.Reconciler) reconcile.Reconciler { return new(turns.Turns).Share(r) }, new(turns.Turns)
	return errors.Join(
		build("migration").For(&api.Migration{}).Owns(&api.Checkpoint{}).Watches(&corev1.Pod{}, own).Complete(move.Share(&migrations{c})),
		build("heir").For(&corev1.Pod{}, builder.WithPredicates(predicate.NewPredicateFuncs(moved))).Complete(move.Share(&heirs{c})),
		build("schedule").For(&api.CheckpointSchedule{}).Watches(&api.Checkpoint{}, bySchedule).Complete(share(&schedules{c})),
		build("ending").For(&corev1.Pod{}, ends).Complete(share(&endings{c})),
		build("template").Watches(&corev1.Pod{}, namespace, builder.WithPredicates(predicate.NewPredicateFuncs(replica))).
			Watches(&api.Checkpoint{}, namespace, builder.WithPredicates(predicate.NewPredicateFuncs(ofTemplate))).Complete(&templates{cluster: c}),
		build("attendance").For(&api.Checkpoint{}).Complete(share(&attendance{cluster: c, namespace: o.Namespace})),
		build("image").For(&api.Checkpoint{}).Complete(share(&pruner{c, o.PlainHTTP})),
		build("key").For(&api.NodeKey{}).WatchesMetadata(aNode(), &handler.EnqueueRequestForObject{}, comesOrGoes).Complete(&formerNodes{c, o.KeepKeys}),
	)
}
