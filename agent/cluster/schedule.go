// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/robfig/cron/v3"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// keep is how many a schedule keeps that does not say, and how many are kept of a template's owner.
const keep = 3

// schedules makes the Checkpoints of CheckpointSchedules, and deletes old ones.
type schedules struct{ cluster }

// Reconcile is called for each change of a schedule and of its Checkpoints, and when it is time.
func (r *schedules) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var s api.CheckpointSchedule
	if err := r.client.Get(ctx, request.NamespacedName, &s); err != nil || s.DeletionTimestamp != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	times, err := parse(s.Spec.Schedule)
	var pods labels.Selector
	if err == nil {
		pods, err = metav1.LabelSelectorAsSelector(s.Spec.Selector)
	}
	if err != nil {
		return ctrl.Result{}, r.say(ctx, &s, false, metav1.ConditionFalse, "Invalid", err.Error())
	}
	var made api.CheckpointList
	if err := r.direct.List(ctx, &made, client.InNamespace(s.Namespace), client.MatchingLabels{api.ScheduleLabel: s.Name}); err != nil {
		return ctrl.Result{}, err
	}
	ofPod := func(k api.Checkpoint) string { return k.Spec.Pod }
	if err := r.drop(ctx, made.Items, cmp.Or(s.Spec.Keep, keep), ofPod); err != nil || s.Spec.Suspend {
		return ctrl.Result{}, err
	}
	last := s.CreationTimestamp.Time
	if s.Status.Last != nil {
		last = s.Status.Last.Time
	}
	now := r.now()
	next := times.Next(last.UTC())
	if next.IsZero() {
		return ctrl.Result{}, r.say(ctx, &s, false, metav1.ConditionFalse, "Invalid", "that time never comes")
	}
	if !next.After(now) {
		if err := r.make(ctx, &s, pods, next, made.Items); err != nil {
			return ctrl.Result{}, err
		}
		// Of the times that have gone by while nobody looked, one is made up for.
		for ; !next.After(now); next = times.Next(next) {
			s.Status.Last = new(metav1.NewTime(next))
		}
	}
	changed := s.Status.Next == nil || !s.Status.Next.Time.Equal(next)
	s.Status.Next = new(metav1.NewTime(next))
	return ctrl.Result{RequeueAfter: next.Sub(now)}, r.say(ctx, &s, changed, metav1.ConditionTrue, "Valid", "it waits for the next time")
}

// parse returns the times of a schedule. It refuses what cron takes for a second, and where cron panics.
func parse(schedule string) (cron.Schedule, error) {
	if strings.Contains(schedule, "=") && !strings.Contains(schedule, " ") {
		return nil, errors.New("there is nothing behind the time zone")
	}
	_, every, _ := strings.Cut(schedule, "@every ") // behind a time zone, if there is one
	if d, err := time.ParseDuration(every); err == nil && d < time.Second {
		return nil, errors.New("@every takes at least a second")
	}
	return cron.ParseStandard(schedule)
}

// say writes the status, if that has changed. Of one that is not valid there is no next time.
func (r *schedules) say(ctx context.Context, s *api.CheckpointSchedule, changed bool, valid metav1.ConditionStatus, reason, message string) error {
	if valid == metav1.ConditionFalse {
		s.Status.Next = nil
	}
	if !meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{Type: "Ready", Status: valid, Reason: reason, Message: message, ObservedGeneration: s.Generation}) && !changed {
		return nil
	}
	return client.IgnoreNotFound(r.client.Status().Update(ctx, s))
}

// make makes the Checkpoints of a time. Their names follow from it: who comes again makes no others.
func (r *schedules) make(ctx context.Context, s *api.CheckpointSchedule, which labels.Selector, at time.Time, made []api.Checkpoint) error {
	var pods corev1.PodList
	if err := r.direct.List(ctx, &pods, client.InNamespace(s.Namespace), client.MatchingLabelsSelector{Selector: which}); err != nil {
		return err
	}
	for _, pod := range pods.Items {
		busy := slices.ContainsFunc(made, func(k api.Checkpoint) bool { return k.Spec.Pod == pod.Name && !k.Status.Phase.Over() })
		if busy || pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil {
			continue
		}
		t := s.Spec.Checkpoint
		k := &api.Checkpoint{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: s.Namespace, Name: fmt.Sprintf("%s-%s-%d", s.Name, pod.UID[:min(8, len(pod.UID))], at.Unix()),
				Labels: map[string]string{api.ScheduleLabel: s.Name},
			},
			Spec: api.Spec{Pod: pod.Name, Container: t.Container, Repository: t.Repository, PushSecret: t.PushSecret, TimeoutSeconds: t.TimeoutSeconds},
		}
		if !s.Spec.KeepImages {
			k.Finalizers = []string{api.ImageFinalizer}
		}
		err := r.client.Create(ctx, k)
		switch {
		case apierrors.IsForbidden(err), apierrors.IsInvalid(err): // a policy, a quota
			r.events.Event(s, corev1.EventTypeWarning, api.CheckpointRefused, api.Text(fmt.Sprintf("of the pod %s: %v", pod.Name, err)))
		case client.IgnoreAlreadyExists(err) != nil:
			return err
		}
	}
	return nil
}

// drop deletes old Checkpoints. Of those with the same of, such as their pod, it keeps the newest that succeeded
// and the newest that failed, most of each.
func (c cluster) drop(ctx context.Context, made []api.Checkpoint, most int, of func(api.Checkpoint) string) error {
	slices.SortFunc(made, func(a, b api.Checkpoint) int { // the newest first
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(b.Name, a.Name))
	})
	type kind struct {
		of    string
		phase api.Phase
	}
	count := map[kind]int{}
	for _, k := range made {
		if !k.Status.Phase.Over() || k.DeletionTimestamp != nil {
			continue
		}
		which := kind{of(k), k.Status.Phase}
		if count[which]++; count[which] <= most {
			continue
		}
		if err := c.client.Delete(ctx, &k); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}
