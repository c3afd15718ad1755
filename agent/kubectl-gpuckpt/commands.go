// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// look is how often the cluster is asked how far an object is.
var look = 500 * time.Millisecond

// get reads an object of the namespace.
func (p plugin) get(ctx context.Context, name string, to client.Object) error {
	return p.client.Get(ctx, client.ObjectKey{Namespace: p.namespace, Name: name}, to)
}

// where returns where the checkpoint of a pod goes: as the user says, or as the pod does.
func (p plugin) where(ctx context.Context, pod string, a asked) (repository, tag, secret string, err error) {
	var of corev1.Pod
	if err := p.get(ctx, pod, &of); err != nil {
		return "", "", "", err
	}
	repository = cmp.Or(a.to, of.Annotations[api.Repository])
	if repository == "" {
		return "", "", "", fmt.Errorf("where does the image go? Give --to REPOSITORY, or the pod the annotation %s", api.Repository)
	}
	if at := strings.LastIndex(repository, ":"); at > strings.LastIndex(repository, "/") && strings.Contains(repository, "/") { // without one it is a port
		repository, tag = repository[:at], repository[at+1:]
	}
	return repository, tag, cmp.Or(a.secret, of.Annotations[api.PushSecret]), nil
}

// checkpoint makes a Checkpoint of a pod.
func (p plugin) checkpoint(ctx context.Context, pod string, a asked) error {
	repository, tag, secret, err := p.where(ctx, pod, a)
	if err != nil {
		return err
	}
	k := &api.Checkpoint{ObjectMeta: p.named(pod, a), Spec: api.Spec{Pod: pod, Container: a.container, Repository: repository, Tag: tag, PushSecret: secret}}
	if err := p.client.Create(ctx, k); err != nil {
		return err
	}
	fmt.Fprintf(p.out, "checkpoint.gpuckpt.dev/%s created\n", k.Name)
	return p.watch(ctx, a, k.Name, k, func() ([]metav1.Condition, string) { return k.Status.Conditions, stage(k) })
}

// migrate makes a Migration of a pod.
func (p plugin) migrate(ctx context.Context, pod string, a asked) error {
	repository, tag, secret, err := p.where(ctx, pod, a)
	if err != nil {
		return err
	}
	if tag != "" {
		return errors.New("the image of a Migration has the tag of its name: give --to without a tag")
	}
	m := &api.Migration{ObjectMeta: p.named(pod, a), Spec: api.MigrationSpec{Pod: pod, NodeName: a.node, Repository: repository, PushSecret: secret}}
	if err := p.client.Create(ctx, m); err != nil {
		return err
	}
	fmt.Fprintf(p.out, "migration.gpuckpt.dev/%s created\n", m.Name)
	return p.watch(ctx, a, m.Name, m, func() ([]metav1.Condition, string) {
		var k api.Checkpoint
		switch err := p.get(ctx, m.Name, &k); {
		case meta.IsStatusConditionTrue(m.Status.Conditions, api.Checkpointed):
			return m.Status.Conditions, "Restoring on " + cmp.Or(m.Status.To, "a node that is not known yet")
		case err != nil:
			return m.Status.Conditions, ""
		}
		return m.Status.Conditions, stage(&k)
	})
}

// named returns the name of an object that is made for a pod.
func (p plugin) named(pod string, a asked) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: p.namespace, Name: cmp.Or(a.name, api.Short(pod)+"-"+time.Now().UTC().Format("0102-150405"))}
}

// watch says how far an object is until it is over, if that is asked for. It fails if the object does.
func (p plugin) watch(ctx context.Context, a asked, name string, object client.Object, state func() ([]metav1.Condition, string)) error {
	for said := ""; a.wait; {
		conditions, now := state()
		if c := meta.FindStatusCondition(conditions, api.HasFailed); c != nil {
			return fmt.Errorf("%s: %s", c.Reason, api.Text(c.Message))
		}
		if c := meta.FindStatusCondition(conditions, api.Complete); c != nil {
			fmt.Fprintln(p.out, c.Type)
			return nil
		}
		if c := meta.FindStatusCondition(conditions, api.Waiting); c != nil {
			now = fmt.Sprintf("%s: %s: %s", c.Type, c.Reason, api.Text(c.Message))
		}
		if now != said && now != "" {
			fmt.Fprintln(p.errs, now)
		}
		said = now
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(look):
		}
		if err := p.get(ctx, name, object); err != nil && !api.Passes(err) {
			return err
		}
	}
	return nil
}

// stage is how far a Checkpoint is, in words.
func stage(k *api.Checkpoint) string {
	if k.Status.Bytes == 0 || k.Status.Stage == "" {
		return k.Status.Stage
	}
	return fmt.Sprintf("%s, %s checkpointed, %d %% pushed", k.Status.Stage, size(k.Status.Bytes), k.Status.Percent)
}

// restore prints a pod that continues from a Checkpoint.
func (p plugin) restore(ctx context.Context, name string, a asked) error {
	var k api.Checkpoint
	if err := p.get(ctx, name, &k); err != nil {
		return err
	}
	if k.Status.Phase != api.Succeeded {
		return fmt.Errorf("the Checkpoint %s is not complete: kubectl gpuckpt logs %s says why", name, name)
	}
	var old corev1.Pod
	like := cmp.Or(a.like, k.Spec.Pod)
	if err := p.get(ctx, like, &old); err != nil {
		return fmt.Errorf("%w: name a pod of the same specification by --like, or write a pod of the images %v with the annotation %s=true", err, k.Images(), api.RestoreAnnotation)
	}
	fresh := api.Again(&old, cmp.Or(a.name, name), cmp.Or(a.secret, k.Spec.PushSecret))
	fresh.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	if metav1.GetControllerOf(&old) != nil { // which would take it for a replica of its own
		fresh.Labels = nil
	}
	if missing := api.SetImages(&fresh.Spec, k.Images()); missing != "" {
		return fmt.Errorf("the container %s did not run at the checkpoint", missing)
	}
	text, err := yaml.Marshal(fresh)
	if err != nil {
		return err
	}
	_, err = p.out.Write(text)
	return err
}

// list prints the Checkpoints and Migrations, the newest last.
func (p plugin) list(ctx context.Context, _ string, _ asked) error {
	var checkpoints api.CheckpointList
	var migrations api.MigrationList
	if err := errors.Join(p.client.List(ctx, &checkpoints, client.InNamespace(p.namespace)), p.client.List(ctx, &migrations, client.InNamespace(p.namespace))); err != nil {
		return err
	}
	type row struct {
		made metav1.Time
		text string
	}
	var rows []row
	add := func(o metav1.ObjectMeta, kind, pod string, phase api.Phase, conditions []metav1.Condition, bytes int64, node, image string) {
		state := cmp.Or(string(phase), "Pending")
		for _, c := range conditions {
			if c.Type == api.HasFailed || c.Type == api.Waiting {
				state = c.Type + ": " + c.Reason
			}
		}
		rows = append(rows, row{o.CreationTimestamp, strings.Join([]string{o.Name, kind, pod, state, size(bytes), node, duration.HumanDuration(time.Since(o.CreationTimestamp.Time)), api.Text(image)}, "\t")})
	}
	for _, k := range checkpoints.Items {
		var images []string
		for _, c := range k.Status.Containers {
			images = append(images, c.Image)
		}
		add(k.ObjectMeta, "Checkpoint", k.Spec.Pod, k.Status.Phase, k.Status.Conditions, k.Status.Bytes, k.Status.Node, strings.Join(images, ","))
	}
	for _, m := range migrations.Items {
		add(m.ObjectMeta, "Migration", m.Spec.Pod, m.Status.Phase, m.Status.Conditions, 0, m.Status.From+" → "+m.Status.To, "")
	}
	slices.SortStableFunc(rows, func(a, b row) int { return a.made.Compare(b.made.Time) })
	w := tabwriter.NewWriter(p.out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tKIND\tPOD\tSTATE\tSIZE\tNODE\tAGE\tIMAGE")
	for _, r := range rows {
		fmt.Fprintln(w, r.text)
	}
	return w.Flush()
}

// logs prints what has become of a Checkpoint, a Migration or a pod: the conditions and the events, of it and of
// the pods that it names, the oldest first.
func (p plugin) logs(ctx context.Context, name string, _ asked) error {
	type line struct {
		at         time.Time
		who, words string
	}
	var lines []line
	of := map[string]bool{name: true}
	add := func(kind string, made *metav1.Time, conditions []metav1.Condition, pods ...string) {
		if made != nil {
			lines = append(lines, line{made.Time, kind, "begins"})
		}
		for _, c := range conditions {
			lines = append(lines, line{c.LastTransitionTime.Time, kind, fmt.Sprintf("%s (%s): %s", c.Type, c.Reason, c.Message)})
		}
		for _, pod := range pods {
			of[pod] = true
		}
	}
	var k api.Checkpoint
	if err := p.get(ctx, name, &k); err == nil {
		add("Checkpoint", k.Status.StartTime, k.Status.Conditions, k.Spec.Pod)
		at := time.Now() // of one that is not over
		if over := k.Status.CompletionTime; over != nil {
			at = over.Time
		}
		for _, c := range k.Status.Containers {
			lines = append(lines, line{at, "Checkpoint", fmt.Sprintf("container %s: %s, checkpoint %s, image %s, push %s of %s: %s@%s",
				c.Name, size(c.Bytes), c.Checkpoint.Duration, c.Build.Duration, c.Push.Duration, size(c.Pushed), c.Image, c.Digest)})
		}
	} else if client.IgnoreNotFound(err) != nil {
		return err
	}
	var m api.Migration
	if err := p.get(ctx, name, &m); err == nil {
		add("Migration", m.Status.StartTime, m.Status.Conditions, m.Spec.Pod, m.Status.NewPod)
	} else if client.IgnoreNotFound(err) != nil {
		return err
	}
	var events corev1.EventList
	if err := p.client.List(ctx, &events, client.InNamespace(p.namespace)); err != nil {
		return err
	}
	for _, e := range events.Items {
		if o := e.InvolvedObject; of[o.Name] && (o.Kind == "Pod" || strings.HasPrefix(o.APIVersion, api.GroupVersion.Group+"/")) {
			at := cmp.Or(e.LastTimestamp.Time, e.EventTime.Time, e.CreationTimestamp.Time)
			lines = append(lines, line{at, o.Kind + " " + o.Name, fmt.Sprintf("%s: %s", e.Reason, e.Message)})
		}
	}
	if len(lines) == 0 {
		return fmt.Errorf("nothing is known of %s in the namespace %s: events are kept for an hour", name, p.namespace)
	}
	slices.SortStableFunc(lines, func(a, b line) int { return a.at.Compare(b.at) })
	for _, l := range lines {
		fmt.Fprintf(p.out, "%s  %-10s  %s\n", l.at.UTC().Format(time.TimeOnly), l.who, api.Text(l.words))
	}
	return nil
}

// size words a number of bytes.
func size(bytes int64) string {
	if bytes < 1<<30 {
		return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}
