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

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

const (
	// readyLimit is how long a new pod may take, if the Migration does not say.
	readyLimit = 10 * time.Minute
	// again is how long until a pod is looked at again that is on its way.
	again = time.Second
	// soon is the grace period of a pod that goes on elsewhere, in seconds. 0 would not wait for its end.
	soon = 1
)

// migrations does Migrations. Each step looks at what is there and does what is missing, so it does
// not matter who did the steps before.
type migrations struct{ cluster }

// errWait is the error of a step that goes on by itself. As the cause of a failure, somebody may have to help.
var errWait = errors.New("it waits")

// Reconcile is called for each change of a Migration, of its Checkpoint and of its pod.
func (r *migrations) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var m api.Migration
	if err := r.client.Get(ctx, request.NamespacedName, &m); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if m.Status.Phase == api.Failed && m.DeletionTimestamp == nil {
		return ctrl.Result{}, errors.Join(r.undo(ctx, &m), r.unhook(ctx, &m)) // not before the cause is noted, which the next round would not find
	}
	if m.Status.Phase.Over() || m.DeletionTimestamp != nil {
		return ctrl.Result{}, nil
	}
	before := m.DeepCopy()
	err := r.migrate(ctx, &m)
	f, failed := errors.AsType[*api.Failure](err)
	if errors.Is(err, errWait) {
		return r.wait(ctx, before, &m, f)
	}
	reason, message := api.Migrated, fmt.Sprintf("the pod %s goes on as %s on the node %s", m.Spec.Pod, m.Status.NewPod, m.Status.To)
	kind, event := api.Complete, corev1.EventTypeNormal
	m.Status.Phase = api.Succeeded
	if err != nil {
		if !failed {
			return ctrl.Result{}, err
		}
		m.Status.Phase, kind, event, reason, message = api.Failed, api.HasFailed, corev1.EventTypeWarning, f.Reason, f.Error()
	}
	m.Status.CompletionTime = new(metav1.NewTime(r.now()))
	meta.RemoveStatusCondition(&m.Status.Conditions, api.Waiting)
	r.condition(&m, kind, reason, message)
	if err := r.save(ctx, before, &m); err != nil {
		return ctrl.Result{}, err
	}
	r.events.Event(&m, event, reason, api.Text(message))
	return ctrl.Result{}, nil
}

// wait has a Migration say what people may have to do, nil for nothing, and returns when it is looked at again.
func (r *migrations) wait(ctx context.Context, before, m *api.Migration, why *api.Failure) (ctrl.Result, error) {
	next := again
	switch {
	case why != nil:
		r.condition(m, api.Waiting, why.Reason, why.Error())
		next = soonest
	case meta.FindStatusCondition(m.Status.Conditions, api.Checkpointed) == nil && m.Status.Phase == api.Running:
		next = 0 // the Checkpoint's end comes by itself
	default:
		meta.RemoveStatusCondition(&m.Status.Conditions, api.Waiting)
	}
	if err := r.save(ctx, before, m); err != nil {
		return ctrl.Result{}, err
	}
	if why != nil && meta.FindStatusCondition(before.Status.Conditions, api.Waiting) == nil {
		r.events.Event(m, corev1.EventTypeWarning, why.Reason, api.Text(why.Error()))
	}
	return ctrl.Result{RequeueAfter: next}, nil
}

// save writes the status, if it has changed. A conflict is an error: another round sees what is new.
func (r *migrations) save(ctx context.Context, before, m *api.Migration) error {
	if fmt.Sprintf("%+v", before.Status) == fmt.Sprintf("%+v", m.Status) {
		return nil
	}
	return client.IgnoreNotFound(r.client.Status().Update(ctx, m))
}

func (r *migrations) condition(m *api.Migration, kind, reason, message string) {
	meta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: reason, Message: api.Text(message), ObservedGeneration: m.Generation, LastTransitionTime: metav1.NewTime(r.now())})
}

// migrate does what is to be done next, and returns errWait while something else is at work. Its
// steps: note the pod; make the new one, gated; checkpoint; open the gate; wait; delete the old one.
func (r *migrations) migrate(ctx context.Context, m *api.Migration) error {
	var old corev1.Pod
	err := r.pod(ctx, m, m.Spec.Pod, &old)
	gone := apierrors.IsNotFound(err) || err == nil && m.Status.SourceUID != "" && string(old.UID) != m.Status.SourceUID
	if err != nil && !gone {
		return err
	}
	if m.Status.Phase == "" {
		return r.begin(ctx, m, &old, gone)
	}
	if meta.FindStatusCondition(m.Status.Conditions, api.Restored) != nil { // whatever the new pod does since
		return r.remove(ctx, m, &old, gone)
	}
	fresh, refused := r.newPod(ctx, m, &old, gone)
	// A pod that ends is checkpointed all the same: a quota counts it until it has ended.
	if f, ok := errors.AsType[*api.Failure](refused); refused != nil && (!ok || f.Reason != api.NewPodRefused || m.Labels[api.EvictedLabel] == "") {
		return refused
	}
	var k *api.Checkpoint
	if meta.FindStatusCondition(m.Status.Conditions, api.Checkpointed) == nil && (fresh == nil || !heir(fresh)) { // else it has the images
		if k, err = r.checkpoint(ctx, m); err != nil {
			return err
		}
	}
	r.condition(m, api.Checkpointed, api.Pushed, "the checkpoint is in the registry: "+m.Name)
	if refused != nil {
		return refused
	}
	if k != nil {
		if err := r.give(ctx, m, k, fresh, gone || old.DeletionTimestamp != nil); err != nil {
			return err
		}
	}
	if m.Spec.DeleteFirst {
		if err := r.remove(ctx, m, &old, gone); err != nil {
			return err
		}
	}
	if gated(fresh) { // until heirs sees that the old pod is gone
		return errWait
	}
	r.condition(m, api.Released, "GateRemoved", "the new pod may start")
	if err := r.ready(m, fresh); err != nil {
		return err
	}
	r.condition(m, api.Restored, "Ready", "the new pod is ready")
	// From here on the new pod does not go with the Migration.
	if len(fresh.OwnerReferences) > 0 {
		fresh.OwnerReferences = nil
		if err := r.client.Update(ctx, fresh); err != nil {
			return err
		}
	}
	return r.remove(ctx, m, &old, gone)
}

func (r *migrations) pod(ctx context.Context, m *api.Migration, name string, to *corev1.Pod) error {
	return r.direct.Get(ctx, client.ObjectKey{Namespace: m.Namespace, Name: name}, to)
}

// begin refuses what cannot be migrated, before anything is touched.
func (r *migrations) begin(ctx context.Context, m *api.Migration, old *corev1.Pod, gone bool) error {
	m.Status.NewPod = cmp.Or(m.Spec.NewPod, m.Name)
	owner := metav1.GetControllerOf(old)
	switch {
	case gone:
		return api.Fail(api.PodNotFound, "there is no pod %s in the namespace %s", m.Spec.Pod, m.Namespace)
	case m.Status.NewPod == m.Spec.Pod:
		return api.Fail(api.NameTaken, "the new pod cannot have the name of the old one: set newPod")
	case owner != nil:
		return api.Fail(api.Owned, "the pod %s is of the %s %s, which would replace it: migrate pods that nothing owns, or have it restored from a tag that moves", old.Name, owner.Kind, owner.Name)
	case old.Spec.NodeName == "" || old.Status.Phase != corev1.PodRunning:
		return api.Fail(api.NotRunning, "the pod %s does not run", old.Name)
	case old.Spec.NodeName == m.Spec.NodeName:
		return api.Fail(api.SameNode, "the pod %s runs on the node %s already", old.Name, m.Spec.NodeName)
	}
	var all api.MigrationList
	if err := r.direct.List(ctx, &all, client.InNamespace(m.Namespace)); err != nil {
		return err
	}
	for _, other := range all.Items { // each would have a pod of its own go on from there
		if other.UID != m.UID && other.Status.Phase == api.Running && other.Status.SourceUID == string(old.UID) {
			if old.DeletionTimestamp != nil && meta.FindStatusCondition(other.Status.Conditions, api.Checkpointed) != nil { // its hook need not wait
				return api.Fail(api.AlreadyMigrating, "the Migration %s has a checkpoint of the pod %s already", other.Name, old.Name)
			}
			return api.Fail(api.Queued, "%w for the Migration %s of the same pod", errWait, other.Name)
		}
	}
	m.Status.Phase, m.Status.SourceUID, m.Status.From, m.Status.StartTime = api.Running, string(old.UID), old.Spec.NodeName, new(metav1.NewTime(r.now()))
	return errWait
}

// newPod returns the pod that goes on, and makes it where it is missing.
func (r *migrations) newPod(ctx context.Context, m *api.Migration, old *corev1.Pod, gone bool) (*corev1.Pod, error) {
	var fresh corev1.Pod
	err := r.pod(ctx, m, m.Status.NewPod, &fresh)
	switch {
	case err == nil && fresh.Annotations[api.MigrationAnnotation] != string(m.UID):
		return nil, api.Fail(api.NameTaken, "there is another pod %s: set newPod", fresh.Name)
	case err == nil && fresh.DeletionTimestamp != nil:
		return nil, api.Fail(api.NewPodDeleted, "the new pod %s was deleted", fresh.Name)
	case err == nil:
		return &fresh, nil
	case !apierrors.IsNotFound(err):
		return nil, err
	case meta.FindStatusCondition(m.Status.Conditions, api.Checkpointed) != nil:
		return nil, api.Fail(api.NewPodDeleted, "the new pod %s was deleted", m.Status.NewPod)
	case gone:
		return nil, api.Fail(api.PodNotFound, "the pod %s is gone", m.Spec.Pod)
	}
	made := copyOf(old, m)
	if err := controllerutil.SetOwnerReference(m, made, r.client.Scheme()); err != nil {
		return nil, err
	}
	switch err := r.client.Create(ctx, made); {
	case apierrors.IsForbidden(err) || apierrors.IsInvalid(err): // a quota, an admission
		return nil, api.Fail(api.NewPodRefused, "make the new pod: %w", err)
	case err != nil:
		return nil, err
	}
	return made, nil
}

// checkpoint returns the Checkpoint, when it has succeeded, and makes it where it is missing.
func (r *migrations) checkpoint(ctx context.Context, m *api.Migration) (*api.Checkpoint, error) {
	var k api.Checkpoint
	err := r.direct.Get(ctx, client.ObjectKeyFromObject(m), &k)
	if apierrors.IsNotFound(err) {
		k = api.Checkpoint{
			ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name},
			Spec:       api.Spec{Pod: m.Spec.Pod, Repository: m.Spec.Repository, PushSecret: m.Spec.PushSecret, TimeoutSeconds: m.Spec.TimeoutSeconds},
		}
		if uid := m.Labels[api.EvictedLabel]; uid != "" {
			k.Labels = map[string]string{api.EvictedLabel: uid}
		}
		if err := controllerutil.SetControllerReference(m, &k, r.client.Scheme()); err != nil {
			return nil, err
		}
		switch err := r.client.Create(ctx, &k); {
		case apierrors.IsForbidden(err) || apierrors.IsInvalid(err):
			return nil, api.Fail(api.CheckpointRefused, "make the Checkpoint: %w", err)
		case err != nil:
			return nil, err
		}
		return nil, errWait
	}
	if err != nil {
		return nil, err
	}
	if !metav1.IsControlledBy(&k, m) {
		return nil, api.Fail(api.NameTaken, "there is another Checkpoint %s: give the Migration another name", k.Name)
	}
	if uid := string(k.Status.PodUID); uid != "" && uid != m.Status.SourceUID {
		return nil, api.Fail(api.PodNotFound, "the pod %s is gone: the Checkpoint %s is of another one of its name", m.Spec.Pod, k.Name)
	}
	if k.DeletionTimestamp != nil { // its image may go with it
		return nil, api.Fail(api.CheckpointFailed, "the Checkpoint %s is deleted", k.Name)
	}
	switch k.Status.Phase {
	case api.Succeeded:
		return &k, nil
	case api.Failed:
		return nil, api.Fail(api.CheckpointFailed, "the Checkpoint %s has failed: %s", k.Name, k.WhyFailed())
	}
	return nil, errWait
}

// give sets the images of the new pod, and removes its gate or has heirs do so: the scheduler may bind it then. The
// only pod that is left, or will be, does not go with the Migration.
func (r *migrations) give(ctx context.Context, m *api.Migration, k *api.Checkpoint, fresh *corev1.Pod, only bool) error {
	if !gated(fresh) {
		return nil
	}
	if missing := api.SetImages(&fresh.Spec, k.Images()); missing != "" {
		return api.Fail(api.NotRunning, "the container %s did not run at the checkpoint", missing)
	}
	if m.Spec.DeleteFirst {
		metav1.SetMetaDataAnnotation(&fresh.ObjectMeta, api.AfterAnnotation, m.Status.SourceUID+"/"+m.Spec.Pod)
	} else {
		ungate(fresh)
	}
	if m.Spec.DeleteFirst || only {
		fresh.OwnerReferences = nil
	}
	err := r.client.Update(ctx, fresh)
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) { // a policy of images
		return api.Fail(api.NewPodRefused, "give the new pod the images of the checkpoint: %w", err)
	}
	return err
}

// ready waits until the new pod is, for a time since it could start: with DeleteFirst the old one may have taken long.
func (r *migrations) ready(m *api.Migration, fresh *corev1.Pod) error {
	m.Status.To = fresh.Spec.NodeName
	limit := cmp.Or(time.Duration(m.Spec.ReadySeconds)*time.Second, readyLimit)
	late := r.now().Sub(meta.FindStatusCondition(m.Status.Conditions, api.Released).LastTransitionTime.Time) > limit
	why := "it is " + string(fresh.Status.Phase)
	for _, c := range fresh.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return nil
		}
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			why = "no node takes it: " + c.Message
		}
	}
	for _, s := range slices.Concat(fresh.Status.InitContainerStatuses, fresh.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil {
			why = fmt.Sprintf("its container %s waits: %s: %s", s.Name, w.Reason, w.Message)
		} else if t := s.LastTerminationState.Terminated; t != nil {
			why = fmt.Sprintf("its container %s ended: %s: %s", s.Name, t.Reason, t.Message)
		}
	}
	switch {
	case fresh.Status.Phase == corev1.PodSucceeded: // it went on, to its end
		return nil
	case fresh.Status.Phase == corev1.PodFailed || late:
		return api.Fail(api.RestoreFailed, "the new pod is not ready %s after it could start: %s", limit, why)
	}
	return errWait
}

// remove deletes the old pod and waits until it is gone. What it would do in its grace period, the
// new one does, so it gets none. It is not checkpointed again. One that ends already takes its time. Nobody
// but the node knows whether it runs yet, so it is never deleted by force here.
func (r *migrations) remove(ctx context.Context, m *api.Migration, old *corev1.Pod, gone bool) error {
	if gone {
		return nil
	}
	if by := old.DeletionTimestamp; by != nil {
		if r.now().Sub(by.Time) < patience {
			return errWait
		}
		return api.Fail(api.OldPodTerminating, "%w for the pod %s, which was to end on the node %s by %s: see that node, and the pod's finalizers. If the machine is off for certain, "+
			"kubectl taint nodes %s node.kubernetes.io/out-of-service=nodeshutdown:NoExecute, or kubectl delete pod %s --namespace %s --force, lets the Migration go on",
			errWait, old.Name, m.Status.From, by.UTC().Format(time.RFC3339), m.Status.From, old.Name, old.Namespace)
	}
	how := []client.DeleteOption{client.Preconditions{UID: &old.UID}, client.GracePeriodSeconds(soon)}
	switch err := r.client.Delete(ctx, old, append(how, client.DryRunAll)...); {
	case !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err):
	case m.Spec.DeleteFirst: // the new pod waits: without a Migration it would start whenever the old one ends
		return api.Fail(api.OldPodRefused, "delete the old pod: %w", err)
	default:
		return api.Fail(api.OldPodRefused, "%w until the old pod can be deleted: %w", errWait, err)
	}
	if old.Annotations[api.OnDeletion] != "" {
		delete(old.Annotations, api.OnDeletion)
		if err := r.client.Update(ctx, old); err != nil {
			return err
		}
	}
	if err := r.client.Delete(ctx, old, how...); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete the old pod: %w", err)
	}
	return errWait
}

// unhook has the preStop hook of a pod that ends wait no longer for the Checkpoint of its Migration, which has failed.
func (r *migrations) unhook(ctx context.Context, m *api.Migration) error {
	var old corev1.Pod
	err := r.pod(ctx, m, m.Spec.Pod, &old)
	why := meta.FindStatusCondition(m.Status.Conditions, api.HasFailed)
	if err != nil || why == nil || old.Annotations[api.Refused] != "" || m.Name != api.EvictionName(old.Name, string(old.UID)) || meta.FindStatusCondition(m.Status.Conditions, api.Checkpointed) != nil {
		return client.IgnoreNotFound(err)
	}
	return r.refuse(ctx, &old, why.Message)
}

// undo deletes the new pod, if it is this Migration's. When the old one ends or is gone, the new one
// is the only one: it stays, and the kubelet tries on.
func (r *migrations) undo(ctx context.Context, m *api.Migration) error {
	var old, fresh corev1.Pod
	if err := r.pod(ctx, m, m.Status.NewPod, &fresh); err != nil || fresh.Annotations[api.MigrationAnnotation] != string(m.UID) {
		return client.IgnoreNotFound(err)
	}
	err := r.pod(ctx, m, m.Spec.Pod, &old)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	ends := err != nil || string(old.UID) != m.Status.SourceUID || old.DeletionTimestamp != nil
	if ends && (!gated(&fresh) || heir(&fresh)) {
		if controllerutil.RemoveOwnerReference(m, &fresh, r.client.Scheme()) != nil {
			return nil // it has none
		}
		return client.IgnoreNotFound(r.client.Update(ctx, &fresh))
	}
	return client.IgnoreNotFound(r.client.Delete(ctx, &fresh, client.Preconditions{UID: &fresh.UID}))
}

// heirs opens the gates of pods that go on for another one, when that is gone: their Migrations may be gone by then. A
// pod whose Migration is gone before the old one was deleted it deletes: no other one looks after that. It has its
// turns with migrations, which would delete the old one meanwhile.
type heirs struct{ cluster }

// heir reports whether a pod goes on for another one.
func heir(pod client.Object) bool { return pod.GetAnnotations()[api.AfterAnnotation] != "" }

// moved reports whether a Migration has made a pod.
func moved(pod client.Object) bool { return pod.GetAnnotations()[api.MigrationAnnotation] != "" }

// Reconcile is called for each change of a pod that a Migration has made.
func (r *heirs) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var old, fresh corev1.Pod
	if err := r.client.Get(ctx, request.NamespacedName, &fresh); err != nil || !gated(&fresh) || fresh.DeletionTimestamp != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if heir(&fresh) {
		uid, name, _ := strings.Cut(fresh.Annotations[api.AfterAnnotation], "/")
		err := r.direct.Get(ctx, client.ObjectKey{Namespace: fresh.Namespace, Name: name}, &old)
		switch {
		case client.IgnoreNotFound(err) != nil:
			return ctrl.Result{}, err
		case err != nil || string(old.UID) != uid:
			ungate(&fresh)
			return ctrl.Result{}, client.IgnoreNotFound(r.client.Update(ctx, &fresh))
		case old.DeletionTimestamp != nil || old.Status.Phase == corev1.PodFailed:
			return ctrl.Result{RequeueAfter: again}, nil
		}
	}
	for _, from := range []client.Reader{r.client, r.direct} { // the first costs nothing, and may be behind
		var all api.MigrationList
		if err := from.List(ctx, &all, client.InNamespace(fresh.Namespace)); err != nil {
			return ctrl.Result{}, err
		}
		if slices.ContainsFunc(all.Items, func(m api.Migration) bool {
			return string(m.UID) == fresh.Annotations[api.MigrationAnnotation] && m.DeletionTimestamp == nil
		}) {
			return ctrl.Result{RequeueAfter: again}, nil
		}
	}
	return ctrl.Result{}, client.IgnoreNotFound(r.client.Delete(ctx, &fresh, client.Preconditions{UID: &fresh.UID, ResourceVersion: &fresh.ResourceVersion}))
}
