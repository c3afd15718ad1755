// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// agentOn is an agent's pod.
func agentOn(nodeName string, ready corev1.ConditionStatus) *corev1.Pod {
	p := running("agent-"+nodeName, nodeName)
	p.UID, p.Labels = "agent", map[string]string{api.NameLabel: api.AgentName}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}
	return p
}

// A Checkpoint whose pod has no node, or whose node has no agent, says at once what it waits for, and
// fails after a while. Every other one is left to the agents.
func TestAttendance(t *testing.T) {
	leaving := agentOn("here", corev1.ConditionTrue)
	leaving.Finalizers, leaving.DeletionTimestamp = []string{"t/t"}, new(metav1.NewTime(start))
	for _, c := range []struct {
		name   string
		pod    *corev1.Pod
		agent  *corev1.Pod
		status api.Status
		gone   bool          // no agents' namespace is known
		goes   bool          // the Checkpoint is deleted
		ended  string        // the UID of the pod whose end it was made for
		limit  time.Duration // how long it waits; 0: patience
		reason string        // of its failure; empty: it is left alone
		says   string
	}{
		{name: "no agent", pod: running("job", "here"), reason: api.NoAgent, says: "no agent works on the node here of the pod job"},
		{name: "no agent, and the pod ends", pod: evicted(running("job", "here")), reason: api.NoAgent, says: "no agent works on the node here of the pod job"},
		{name: "one elsewhere", pod: running("job", "here"), agent: agentOn("there", corev1.ConditionTrue), reason: api.NoAgent, says: "it has no pod there"},
		{name: "one that does not run", pod: running("job", "here"), agent: agentOn("here", corev1.ConditionFalse), reason: api.NoAgent, says: "its pod agent-here there is not ready"},
		{name: "in no known namespace", pod: running("job", "here"), gone: true, reason: api.NoAgent, says: "no agent works"},
		{name: "left in the middle", pod: running("job", "here"), status: api.Status{Phase: api.Running, Node: "here"}, reason: api.NoAgent, says: "has left the checkpoint of the pod job unfinished"},
		{name: "left in the middle, and deleted", pod: running("job", "here"), status: api.Status{Phase: api.Running, Node: "here"}, goes: true, reason: api.NoAgent, says: "has left the checkpoint of the pod job unfinished"},
		{name: "no pod", reason: "PodNotFound", limit: time.Nanosecond, says: "no pod job in the namespace ns"},
		{name: "another pod of the name, which does not end", pod: running("job", "here"), agent: agentOn("here", corev1.ConditionTrue), ended: "another", reason: api.PodNotFound, limit: time.Nanosecond, says: "another one has its name"},
		{name: "a busy agent, and the pod ends", pod: evicted(running("job", "here")), agent: agentOn("here", corev1.ConditionTrue), ended: "12345678-9"},
		{name: "a busy agent", pod: running("job", "here"), agent: agentOn("here", corev1.ConditionTrue)},
		{name: "in the middle", pod: running("job", "here"), agent: agentOn("here", corev1.ConditionTrue), status: api.Status{Phase: api.Running, Node: "here"}},
		{name: "in the middle, and the agent ends after it", pod: running("job", "here"), agent: leaving, status: api.Status{Phase: api.Running, Node: "here"}},
		{name: "no node has room", pod: pending(corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "0/3 nodes are available"}), limit: unscheduled, reason: api.NotScheduled, says: "the pod job is on no node yet: 0/3 nodes are available"},
		{name: "no scheduler", pod: pending(), limit: unscheduled, reason: api.NotScheduled, says: "no scheduler has said why"},
		{name: "over", pod: running("job", "here"), status: api.Status{Phase: api.Succeeded}},
	} {
		t.Run(c.name, func(t *testing.T) {
			checkpoint := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "k"}, Spec: api.Spec{Pod: "job", Repository: "r/job"}, Status: c.status}
			if c.ended != "" {
				checkpoint.Labels = map[string]string{api.EvictedLabel: c.ended}
			}
			if c.goes {
				now := metav1.Now()
				checkpoint.Finalizers, checkpoint.DeletionTimestamp = []string{api.ImageFinalizer}, &now
			}
			objects := []client.Object{checkpoint}
			for _, p := range []*corev1.Pod{c.pod, c.agent} {
				if p != nil {
					objects = append(objects, p)
				}
			}
			k := newTest(t, objects...)
			look := func() (api.Checkpoint, time.Duration) {
				t.Helper()
				r := &attendance{cluster: k.cluster, namespace: "ns"} // as one that was restarted
				if c.gone {
					r.namespace = ""
				}
				result := k.reconcile(r, "k")
				var now api.Checkpoint
				k.get("k", &now)
				return now, result.RequeueAfter
			}
			limit := cmp.Or(c.limit, patience)
			for end := k.clock.Add(limit); limit > 1 && k.clock.Before(end); k.clock = k.clock.Add(limit / 10) {
				now, again := look()
				if now.Status.Phase != c.status.Phase || (again == 0) != c.status.Phase.Over() {
					t.Fatalf("after %s it is %+v, and looked at again in %s", k.clock.Sub(start), now.Status, again)
				}
				waits := meta.FindStatusCondition(now.Status.Conditions, api.Waiting)
				if says := c.reason != ""; says != (waits != nil) || says && (waits.Reason != c.reason || !strings.Contains(waits.Message, c.says)) {
					t.Fatalf("after %s it waits for %+v", k.clock.Sub(start), waits)
				}
			}
			k.clock = k.clock.Add(time.Second)
			now, _ := look()
			if c.reason == "" {
				if now.Status.Phase != c.status.Phase || len(k.events.Events) > 0 {
					t.Errorf("%+v, %d events", now.Status, len(k.events.Events))
				}
				return
			}
			said := meta.FindStatusCondition(now.Status.Conditions, api.HasFailed)
			if now.Status.Phase != api.Failed || now.Status.CompletionTime == nil || said == nil || said.Reason != c.reason || !strings.Contains(said.Message, c.says) || len(now.Status.Conditions) != 1 {
				t.Errorf("%+v", now.Status)
			}
			want := 1
			if c.reason != "PodNotFound" {
				want = 2 // it says at once what it waits for
			}
			if c.pod != nil && api.Ending(c.pod) != "" {
				want++ // of the pod
			}
			if len(k.events.Events) != want {
				t.Errorf("%d events, want %d", len(k.events.Events), want)
			}
		})
	}
}

// A Checkpoint whose node is at another one of its namespace says so until its turn comes.
func TestQueued(t *testing.T) {
	first := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "first"}, Status: api.Status{Phase: api.Running, Node: "here"}}
	second := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k"}, Spec: api.Spec{Pod: "job"}, Status: api.Status{Node: "here"}}
	k := newTest(t, first, second, running("job", "here"), agentOn("here", corev1.ConditionTrue))
	r := &attendance{cluster: k.cluster, namespace: "ns"}
	for _, want := range []string{"the node here is at the Checkpoint first of this namespace", ""} {
		k.reconcile(r, "k")
		said := ""
		if k.get("k", second); len(second.Status.Conditions) > 0 {
			said = second.Status.Conditions[0].Message
		}
		if said != want || len(k.events.Events) > 0 {
			t.Errorf("it says %q, want %q; %d events", said, want, len(k.events.Events))
		}
		k.get("first", first)
		first.Status.Phase = api.Succeeded
		k.must(k.client.Status().Update(t.Context(), first))
	}
}

// evicted has a pod end that is to be checkpointed before.
func evicted(pod *corev1.Pod) *corev1.Pod {
	pod.Annotations = map[string]string{api.OnEviction: api.DoCheckpoint}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}
	pod.DeletionTimestamp, pod.Finalizers = new(metav1.NewTime(start)), []string{"t/t"}
	return pod
}

// pending is a pod that no node has taken.
func pending(conditions ...corev1.PodCondition) *corev1.Pod {
	p := running("job", "")
	p.Status.Phase, p.Status.Conditions = corev1.PodPending, conditions
	return p
}

// A Checkpoint that waited for its pod to be scheduled waits for the node's agent from then on, and for
// nothing when that is there: its conditions say so.
func TestAttendanceOfAPodThatIsScheduled(t *testing.T) {
	pod := pending()
	k := newTest(t, pod, &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "k"}, Spec: api.Spec{Pod: "job", Repository: "r/job"}})
	r := &attendance{cluster: k.cluster, namespace: "ns"}
	look := func(reason string) {
		t.Helper()
		k.reconcile(r, "k")
		var now api.Checkpoint
		k.get("k", &now)
		waits := meta.FindStatusCondition(now.Status.Conditions, api.Waiting)
		if now.Status.Phase != "" || (waits != nil) != (reason != "") || waits != nil && waits.Reason != reason {
			t.Fatalf("%+v, want %q", now.Status, reason)
		}
	}
	look(api.NotScheduled)
	k.clock = k.clock.Add(unscheduled - time.Second)
	look(api.NotScheduled)
	k.get("job", pod)
	pod.Spec.NodeName = "here"
	k.must(k.client.Update(t.Context(), pod))
	k.clock = k.clock.Add(2 * time.Second)
	look(api.NoAgent)
	for _, want := range []string{api.NotScheduled, api.NoAgent} {
		if e := k.says(); !strings.HasPrefix(e, "Warning "+want) {
			t.Errorf("the event is %q, want %s", e, want)
		}
	}
	k.must(k.client.Create(t.Context(), agentOn("here", corev1.ConditionTrue)))
	look("")
}

// An agent that is away for a moment, such as for an update, ends nothing.
func TestAttendanceOfAnAgentThatComesBack(t *testing.T) {
	k := newTest(t, running("job", "here"), &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "k"}, Spec: api.Spec{Pod: "job", Repository: "r/job"}})
	r := &attendance{cluster: k.cluster, namespace: "ns"}
	for range 5 {
		for _, there := range []bool{false, true} {
			agent := agentOn("here", corev1.ConditionTrue)
			if there {
				k.must(k.client.Create(t.Context(), agent))
			} else {
				k.must(client.IgnoreNotFound(k.client.Delete(t.Context(), agent)))
			}
			k.clock = k.clock.Add(patience / 2)
			k.reconcile(r, "k")
		}
	}
	var now api.Checkpoint
	if k.get("k", &now); now.Status.Phase != "" {
		t.Errorf("%+v", now.Status)
	}
}

// A Migration whose pod's node has no agent ends with its Checkpoint, and leaves the pod running.
func TestMigrationWithoutAnAgent(t *testing.T) {
	k := newTest(t, running("old", "here"), migration(nil))
	k.step()
	r := &attendance{cluster: k.cluster, namespace: "ns"}
	for range 2 {
		k.reconcile(r, "m")
		k.clock = k.clock.Add(patience)
	}
	m := k.step()
	said := meta.FindStatusCondition(m.Status.Conditions, api.HasFailed)
	if m.Status.Phase != api.Failed || said == nil || !strings.Contains(said.Message, "no agent works on the node here") || !k.get("old", &corev1.Pod{}) || k.get("m", &corev1.Pod{}) {
		t.Errorf("%+v", m.Status)
	}
}

// The controller says whose a Checkpoint is, and hands its node what the secret has for the registry of
// the push, sealed. It deletes the pod of one that has succeeded, if that is the pod that was checkpointed.
func TestAttendanceForTheNode(t *testing.T) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "registry"}, Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(
		`{"credHelpers": {"r.test": "own"}, "credsStore": "own", "auths": {"https://r.test/v1/": {"auth": "eDp5"}, "other.test": {"auth": "eDp5"}}}`)}}
	several := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "several"}, Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(
		`{"auths": {"r.test": {"auth": "YTpi"}, "r.test/team": {"auth": "YTpi"}, "https://r.test/team/job": {"auth": "eDp5"}, "r.test/team/jo": {"auth": "YTpi"}, "r.test/team/job/own": {"auth": "YTpi"}}}`)}}
	opaque := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "opaque"}, Type: corev1.SecretTypeOpaque, Data: map[string][]byte{"key": []byte("secret")}}
	hub := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "hub"}, Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(
		`{"auths": {"https://index.docker.io/v1/": {"auth": "YTpi"}, "docker.io/team": {"auth": "eDp5"}}}`)}}
	for _, c := range []struct{ secret, repository, key, reason string }{
		{"registry", "r.test/team/job", "r.test", ""}, {"several", "r.test/team/job", "r.test", ""}, {"hub", "docker.io/team/job", "https://index.docker.io/v1/", ""},
		{"opaque", "r.test/team/job", "", "NoSecret"}, {"none", "r.test/team/job", "", "NoSecret"},
	} {
		k := newTest(t, hub.DeepCopy(), secret.DeepCopy(), several.DeepCopy(), opaque.DeepCopy(), running("job", "here"), agentOn("here", corev1.ConditionTrue),
			&api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "k"}, Spec: api.Spec{Pod: "job", Repository: c.repository, PushSecret: c.secret, LeaveRunning: new(false)}})
		r := &attendance{cluster: k.cluster, namespace: "ns"}
		look := func() (now api.Checkpoint) {
			t.Helper()
			k.reconcile(r, "k")
			k.get("k", &now)
			return now
		}
		now := look()
		if s := now.Status; s.Node != "here" || s.PodUID != "12345678-9" || s.Phase != "" || s.Handover != nil {
			t.Fatalf("%+v", s)
		}
		handover, key, err := api.NewHandover()
		k.must(err)
		now.Status.Phase, now.Status.Handover = api.Running, handover
		k.must(k.client.Status().Update(t.Context(), &now))
		now = look()
		if c.reason != "" {
			if said := meta.FindStatusCondition(now.Status.Conditions, api.HasFailed); said == nil || said.Reason != c.reason || now.Status.Handover != nil {
				t.Errorf("with the secret %s: %+v", c.secret, now.Status)
			}
			continue
		}
		got, err := now.Status.Handover.Open("k", key)
		if want := `{"auths":{"` + c.key + `":{"username":"x","password":"y","auth":"eDp5"}}}`; err != nil || string(got) != want {
			t.Errorf("it has %s, %v", got, err)
		}
		if _, err := now.Status.Handover.Open("other", key); err == nil {
			t.Error("what was handed over for one Checkpoint opens as another's")
		}
		now.Status.Phase, now.Status.PodUID = api.Succeeded, "other"
		k.must(k.client.Status().Update(t.Context(), &now))
		now = look()
		if !k.get("job", &corev1.Pod{}) {
			t.Error("another pod of the name is gone")
		}
		now.Status.PodUID = "12345678-9"
		k.must(k.client.Status().Update(t.Context(), &now))
		look()
		if k.get("job", &corev1.Pod{}) {
			t.Error("the pod is still there")
		}
		look()
	}
}

// The image of a Checkpoint that is deleted may go with it: the pod stays.
func TestDeletedKeepsItsPod(t *testing.T) {
	now := metav1.Now()
	k := newTest(t, running("job", "here"), &api.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", Finalizers: []string{api.ImageFinalizer}, DeletionTimestamp: &now},
		Spec:       api.Spec{Pod: "job", LeaveRunning: new(false)}, Status: api.Status{Phase: api.Succeeded, PodUID: "12345678-9"},
	})
	r := &attendance{cluster: k.cluster}
	if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "k"}}); err != nil || !k.get("job", &corev1.Pod{}) {
		t.Errorf("the pod is gone, or %v", err)
	}
}
