// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// retry is how long after the first Checkpoint of a template that failed another is made, and how often one is
// asked for that the API server refuses.
const retry = time.Minute

// templates has replicas continue from the checkpoint of the first one of their template that was ready.
//
// A template has a gate, which keeps its pods from being scheduled. A pod whose template has a checkpoint
// gets the images of that one, and then loses its gate. Any other starts cold, and the first of them that is
// ready is checkpointed. The images of the template are noted in an annotation, and a pod that its checkpoint
// does not start gets them back. Each step is one update, and is decided by the pod and the Checkpoint alone.
type templates struct {
	cluster
	refused sync.Map // when the API server has refused a Checkpoint, by its key, for as long as that holds
}

// Reconcile is called for a namespace, for each change of a pod of such a template and of its Checkpoints: one
// namespace has one worker, however many pods it makes.
func (r *templates) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	r.refused.Range(func(key, at any) bool {
		if r.now().Sub(at.(time.Time)) >= retry { //nolint:forcetypeassert // it is one
			r.refused.Delete(key)
		}
		return true
	})
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods, client.InNamespace(request.Namespace)); err != nil {
		return ctrl.Result{}, err
	}
	var failed []error
	var next time.Duration
	for i := range pods.Items {
		if pod := &pods.Items[i]; replica(pod) && pod.DeletionTimestamp == nil {
			wait, err := r.replica(ctx, pod)
			failed = append(failed, client.IgnoreNotFound(err))
			next = min(cmp.Or(next, wait), cmp.Or(wait, next)) // 0 is never
		}
	}
	return ctrl.Result{RequeueAfter: next}, errors.Join(failed...)
}

// replica reports whether a pod is of a template that has the gate.
func replica(pod client.Object) bool {
	p, ok := pod.(*corev1.Pod)
	return ok && p.Annotations[api.MigrationAnnotation] == "" && (p.Annotations[api.ImagesAnnotation] != "" || gated(p))
}

func isGate(g corev1.PodSchedulingGate) bool { return g.Name == api.Gate }

func gated(pod *corev1.Pod) bool { return slices.ContainsFunc(pod.Spec.SchedulingGates, isGate) }

func ungate(pod *corev1.Pod) {
	pod.Spec.SchedulingGates = slices.DeleteFunc(pod.Spec.SchedulingGates, isGate)
}

// replica does what is to be done with one pod, and returns after how long it is looked at again; 0: never.
func (r *templates) replica(ctx context.Context, pod *corev1.Pod) (time.Duration, error) {
	if gated(pod) {
		return 0, r.admit(ctx, pod)
	}
	given := given(pod)
	if maps.Equal(images(pod), given) {
		return r.take(ctx, pod)
	}
	why := stuck(pod, given)
	if why == "" {
		return 0, nil
	}
	api.SetImages(&pod.Spec, given)
	delete(pod.Annotations, api.RestoreAnnotation)
	err := r.client.Update(ctx, pod)
	if err == nil {
		r.events.Event(pod, corev1.EventTypeWarning, api.StartsCold, api.Text("its checkpoint does not start: "+why))
	}
	return 0, err
}

// admit removes a pod's gate. A pod whose template has a checkpoint gets the images of that checkpoint. On an
// error the pod is as it was.
func (r *templates) admit(ctx context.Context, pod *corev1.Pod) error {
	noted, _ := json.Marshal(images(pod)) // a map of strings
	k, cold := r.find(ctx, pod)
	open := func(to *corev1.Pod) error {
		metav1.SetMetaDataAnnotation(&to.ObjectMeta, api.ImagesAnnotation, string(noted))
		ungate(to)
		return r.client.Update(ctx, to)
	}
	if cold == nil {
		restored := pod.DeepCopy()
		metav1.SetMetaDataAnnotation(&restored.ObjectMeta, api.RestoreAnnotation, "prefer")
		api.SetImages(&restored.Spec, k.Images())
		err := open(restored)
		if err == nil {
			r.events.Event(pod, corev1.EventTypeNormal, api.Continues, "it continues from the Checkpoint "+k.Name)
		}
		if err == nil || api.Passes(err) || apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return err
		}
		cold = fmt.Errorf("it may not have the images of the Checkpoint %s: %w", k.Name, err) // as by a policy of the cluster
	}
	if err := open(pod); err != nil {
		return err
	}
	r.events.Event(pod, corev1.EventTypeNormal, api.StartsCold, api.Text(cold.Error()))
	return nil
}

// find returns the Checkpoint that a pod continues from, or an error that says why there is none.
func (r *templates) find(ctx context.Context, pod *corev1.Pod) (*api.Checkpoint, error) {
	of := template(pod)
	if of == "" {
		return nil, errors.New("no controller owns it: only replicas of one owner continue from one checkpoint")
	}
	tries, err := r.tries(ctx, pod, of)
	if err != nil || len(tries) == 0 {
		return nil, errors.New("there is no checkpoint of its template yet: the first replica that is ready is checkpointed")
	}
	k := &tries[0]
	missing := api.SetImages(pod.Spec.DeepCopy(), k.Images())
	switch {
	case k.Status.Phase == api.Failed:
		return nil, fmt.Errorf("the Checkpoint %s of its template has failed: it is made again, after twice as long each time", k.Name)
	case k.Status.Phase != api.Succeeded || k.DeletionTimestamp != nil:
		return nil, fmt.Errorf("the Checkpoint %s of its template is not complete", k.Name)
	case k.Status.Template != of:
		return nil, fmt.Errorf("the Checkpoint %s is of another template", k.Name)
	case missing != "":
		return nil, fmt.Errorf("the Checkpoint %s lacks the container %s", k.Name, missing)
	}
	return k, nil
}

// tries returns the Checkpoints of a pod's template, the newest first: those before it have failed.
func (r *templates) tries(ctx context.Context, pod *corev1.Pod, of string) ([]api.Checkpoint, error) {
	var all api.CheckpointList
	if err := r.client.List(ctx, &all, client.InNamespace(pod.Namespace), family(pod)); err != nil {
		return nil, err
	}
	number := func(k api.Checkpoint) int { return try(k.Name, checkpointName(pod, of)) }
	all.Items = slices.DeleteFunc(all.Items, func(k api.Checkpoint) bool { return number(k) == 0 })
	slices.SortFunc(all.Items, func(a, b api.Checkpoint) int { return number(b) - number(a) })
	return all.Items, nil
}

// take has a replica that started cold checkpointed when it is ready, if none of its template was. If that
// failed, it is tried again a minute later, and after twice as long each time, whichever replica is ready then.
func (r *templates) take(ctx context.Context, pod *corev1.Pod) (time.Duration, error) {
	of := template(pod)
	if of == "" || !is(pod, corev1.ContainersReady) {
		return 0, nil
	}
	tries, err := r.tries(ctx, pod, of)
	if err != nil {
		return 0, err
	}
	owner, name := metav1.GetControllerOf(pod), checkpointName(pod, of)
	failed := func(k *api.Checkpoint) bool { // and is not somebody else's
		return k.Status.Phase == api.Failed && k.DeletionTimestamp == nil && slices.ContainsFunc(k.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == owner.UID })
	}
	for i := 1; i < len(tries); i++ {
		if k := &tries[i]; failed(k) {
			if err := r.client.Delete(ctx, k, client.Preconditions{UID: &k.UID}); client.IgnoreNotFound(err) != nil {
				return 0, err
			}
		}
	}
	if len(tries) > 0 {
		k := &tries[0]
		if !failed(k) {
			return 0, nil // it is called again when that changes
		}
		n := try(k.Name, name) // of which the eleventh and later ones are 17 hours apart
		if left := retry<<min(n-1, 10) - r.now().Sub(cmp.Or(k.Status.CompletionTime, &k.CreationTimestamp).Time); left > 0 {
			return left, nil
		}
		name = fmt.Sprintf("%s-%d", name, n+1)
	}
	k := &api.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: name, Labels: family(pod), Finalizers: []string{api.ImageFinalizer},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: owner.APIVersion, Kind: owner.Kind, Name: owner.Name, UID: owner.UID}},
		},
		Spec: api.Spec{Pod: pod.Name, Repository: pod.Annotations[api.Repository], PushSecret: pod.Annotations[api.PushSecret]},
	}
	if _, ok := r.refused.Load(client.ObjectKeyFromObject(k)); ok { // of another replica: it would be the same
		return retry, nil
	}
	switch err := r.client.Create(ctx, k); {
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err): // no repository, or none that is allowed
		r.refused.Store(client.ObjectKeyFromObject(k), r.now())
		r.events.Event(pod, corev1.EventTypeWarning, api.CheckpointRefused, api.Text(err.Error()))
		return retry, nil
	case err != nil:
		return 0, client.IgnoreAlreadyExists(err)
	}
	r.events.Event(pod, corev1.EventTypeNormal, api.CheckpointBegins, "it is the first of its template that is ready: "+name)
	var made api.CheckpointList
	if err := r.direct.List(ctx, &made, client.InNamespace(pod.Namespace), family(pod)); err != nil {
		return 0, err
	}
	taken := slices.DeleteFunc(made.Items, func(k api.Checkpoint) bool { return k.Status.Template == "" }) // whoever makes one writes labels
	return 0, r.drop(ctx, taken, keep, func(api.Checkpoint) string { return "" })
}

// stuck returns why a pod does not start from its checkpoint, or "".
func stuck(pod *corev1.Pod, given map[string]string) string {
	now := images(pod)
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		w, ended := s.State.Waiting, s.LastTerminationState.Terminated
		switch {
		case w == nil || now[s.Name] == given[s.Name]:
		case w.Reason == "ImagePullBackOff":
			return fmt.Sprintf("container %s: %s", s.Name, w.Message)
		case w.Reason == "CrashLoopBackOff" && s.RestartCount > 0 && ended != nil: // it has failed twice
			return fmt.Sprintf("container %s: %s: %s", s.Name, ended.Reason, ended.Message)
		}
	}
	return ""
}

// images returns the images of a pod by the names of its containers.
func images(pod *corev1.Pod) map[string]string {
	all := map[string]string{}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		all[c.Name] = c.Image
	}
	return all
}

// given returns the images that a replica's template has. It ignores an annotation that is no such list.
func given(pod *corev1.Pod) map[string]string {
	all := images(pod)
	_ = json.Unmarshal([]byte(pod.Annotations[api.ImagesAnnotation]), &all) // replaces those that it has now
	return all
}

// ofTemplate reports whether a Checkpoint is of a template.
func ofTemplate(k client.Object) bool { return k.GetLabels()[api.TemplateLabel] != "" }

// template returns a digest of what the replicas of one template have alike, and no other pod has: their owner
// and its revision, and all of their containers but what each pod gets of its own. It is "" for a pod that
// is no replica.
func template(pod *corev1.Pod) string {
	owner := metav1.GetControllerOf(pod)
	if owner == nil || !replica(pod) {
		return ""
	}
	spec := pod.Spec.DeepCopy()
	api.SetImages(spec, given(pod))
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			list[i].VolumeMounts = slices.DeleteFunc(list[i].VolumeMounts, func(m corev1.VolumeMount) bool {
				return strings.HasPrefix(m.Name, "kube-api-access-") // of the pod's account, with a name by chance
			})
		}
	}
	data, _ := json.Marshal([]any{owner.UID, pod.Labels[appsv1.DefaultDeploymentUniqueLabelKey], pod.Labels[appsv1.ControllerRevisionHashLabelKey], spec.InitContainers, spec.Containers})
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// checkpointName is the name of the first Checkpoint of a template, which one replica makes.
func checkpointName(pod *corev1.Pod, template string) string {
	return api.EvictionName(metav1.GetControllerOf(pod).Name, template)
}

// try returns the number of a Checkpoint among those of a template, which ends all names but the first; 0:
// it is none of them.
func try(name, first string) int {
	if name == first {
		return 1
	}
	number, ok := strings.CutPrefix(name, first+"-")
	if n, err := strconv.Atoi(number); ok && err == nil {
		return max(n, 0)
	}
	return 0
}

// family is the label of all Checkpoints of a pod's owner. A ReplicaSet has the name of its Deployment, and
// behind it the template's.
func family(pod *corev1.Pod) client.MatchingLabels {
	of := strings.TrimSuffix(metav1.GetControllerOf(pod).Name, "-"+pod.Labels[appsv1.DefaultDeploymentUniqueLabelKey])
	return client.MatchingLabels{api.TemplateLabel: api.Short(of)}
}
