// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fromNodes has the DaemonSet that installs gpuckpt on nodes uninstall it, and returns when all nodes are
// done: what Helm runs before it deletes a release. The agents go first. It can be called again.
func fromNodes(ctx context.Context, c client.Client, namespace string) error {
	agents := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "gpuckpt-agent"}}
	if err := c.Delete(ctx, agents); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete the agents: %w", err)
	}
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "gpuckpt-node"}}
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		if err := c.Get(ctx, client.ObjectKeyFromObject(d), d); err != nil {
			return err
		}
		i := &d.Spec.Template.Spec.InitContainers[0]
		args := []string{"uninstall", "--root=/host"}
		if slices.Contains(i.Args, "--restart") {
			args = append(args, "--restart")
		}
		i.Name, i.Args = "uninstall", args
		// One after another, a node that is down, or still has containers, would keep all others waiting.
		d.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateDaemonSet{MaxUnavailable: new(intstr.FromString("100%"))}
		return c.Update(ctx, d)
	})
	for ; err == nil; err = c.Get(ctx, client.ObjectKeyFromObject(d), d) {
		s := d.Status
		if s.ObservedGeneration >= d.Generation && s.UpdatedNumberScheduled == s.DesiredNumberScheduled && s.NumberReady == s.DesiredNumberScheduled {
			return nil
		}
		fmt.Printf("%d of %d nodes are done; what a node waits for: kubectl logs --namespace %s --selector app.kubernetes.io/name=gpuckpt-node --container uninstall\n",
			min(s.UpdatedNumberScheduled, s.NumberReady), s.DesiredNumberScheduled, namespace)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(2 * time.Second):
		}
	}
	return client.IgnoreNotFound(err)
}
