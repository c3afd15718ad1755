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
	"k8s.io/apimachinery/pkg/types"
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
	for _, c := range []struct {
		name   string
		pod    *corev1.Pod
		agent  *corev1.Pod
		status api.Status
		gone   bool          // no agents' namespace is known
		limit  time.Duration // how long it waits; 0: patience
		reason string        // of its failure; empty: it is left alone
		says   string
	}{
		{name: "no agent", pod: running("job", "here"), reason: api.NoAgent, says: "no agent works on the node here of the pod job"},
		{name: "one elsewhere", pod: running("job", "here"), agent: agentOn("there", corev1.ConditionTrue), reason: api.NoAgent, says: "it has no pod there"},
		{name: "one that does not run", pod: running("job", "here"), agent: agentOn("here", corev1.ConditionFalse), reason: api.NoAgent, says: "its pod agent-here there is not ready"},
		{name: "in no known namespace", pod: running("job", "here"), gone: true, reason: api.NoAgent, says: "no agent works"},
		{name: "left in the middle", pod: running("job", "here"), status: api.Status{Phase: api.Running, Node: "here"}, reason: api.NoAgent, says: "has left the checkpoint of the pod job unfinished"},
		{name: "no pod", reason: "PodNotFound", says: "no pod job in the namespace ns"},
		{name: "a busy agent", pod: running("job", "here"), agent: agentOn("here", corev1.ConditionTrue)},
		{name: "in the middle", pod: running("job", "here"), agent: agentOn("here", corev1.ConditionTrue), status: api.Status{Phase: api.Running, Node: "here"}},
		{name: "no node has room", pod: pending(corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "0/3 nodes are available"}), limit: unscheduled, reason: api.NotScheduled, says: "the pod job is on no node yet: 0/3 nodes are available"},
		{name: "no scheduler", pod: pending(), limit: unscheduled, reason: api.NotScheduled, says: "no scheduler has said why"},
		{name: "over", pod: running("job", "here"), status: api.Status{Phase: api.Succeeded}},
	} {
		t.Run(c.name, func(t *testing.T) {
			objects := []client.Object{&api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "k"}, Spec: api.Spec{Pod: "job", Repository: "r/job"}, Status: c.status}}
			for _, p := range []*corev1.Pod{c.pod, c.agent} {
				if p != nil {
					objects = append(objects, p)
				}
			}
			k := newTest(t, objects...)
			r := &attendance{cluster: k.cluster, namespace: "ns", since: make(map[types.UID]wait)}
			if c.gone {
				r.namespace = ""
			}
			look := func() (api.Checkpoint, time.Duration) {
				t.Helper()
				result, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "k"}})
				if err != nil {
					t.Fatal(err)
				}
				var now api.Checkpoint
				k.get("k", &now)
				return now, result.RequeueAfter
			}
			limit := cmp.Or(c.limit, patience)
			for end := k.clock.Add(limit); k.clock.Before(end); k.clock = k.clock.Add(limit / 10) {
				now, again := look()
				if now.Status.Phase != c.status.Phase || (again == 0) != c.status.Phase.Over() {
					t.Fatalf("after %s it is %+v, and looked at again in %s", k.clock.Sub(start), now.Status, again)
				}
				waits := meta.FindStatusCondition(now.Status.Conditions, api.Waiting)
				if says := c.reason != "" && c.reason != "PodNotFound"; says != (waits != nil) || says && (waits.Reason != c.reason || !strings.Contains(waits.Message, c.says)) {
					t.Fatalf("after %s it waits for %+v", k.clock.Sub(start), waits)
				}
			}
			k.clock = k.clock.Add(time.Second)
			now, _ := look()
			if c.reason == "" {
				if now.Status.Phase != c.status.Phase || len(k.events.Events) > 0 || len(r.since) > 0 {
					t.Errorf("%+v, %d events, %v", now.Status, len(k.events.Events), r.since)
				}
				return
			}
			said := meta.FindStatusCondition(now.Status.Conditions, api.HasFailed)
			if now.Status.Phase != api.Failed || now.Status.Completed == nil || said == nil || said.Reason != c.reason || !strings.Contains(said.Message, c.says) || len(now.Status.Conditions) != 1 {
				t.Errorf("%+v", now.Status)
			}
			want := 1
			if c.reason != "PodNotFound" {
				want = 2 // it says at once what it waits for
			}
			if len(k.events.Events) != want || len(r.since) > 0 {
				t.Errorf("%d events, want %d; %v", len(k.events.Events), want, r.since)
			}
		})
	}
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
	r := &attendance{cluster: k.cluster, namespace: "ns", since: make(map[types.UID]wait)}
	look := func(reason string) {
		t.Helper()
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "k"}}); err != nil {
			t.Fatal(err)
		}
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
	k.must(k.client.Create(t.Context(), agentOn("here", corev1.ConditionTrue)))
	look("")
}

// An agent that is away for a moment, such as for an update, ends nothing.
func TestAttendanceOfAnAgentThatComesBack(t *testing.T) {
	k := newTest(t, running("job", "here"), &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", UID: "k"}, Spec: api.Spec{Pod: "job", Repository: "r/job"}})
	r := &attendance{cluster: k.cluster, namespace: "ns", since: make(map[types.UID]wait)}
	for range 5 {
		for _, there := range []bool{false, true} {
			agent := agentOn("here", corev1.ConditionTrue)
			if there {
				k.must(k.client.Create(t.Context(), agent))
			} else {
				k.must(client.IgnoreNotFound(k.client.Delete(t.Context(), agent)))
			}
			k.clock = k.clock.Add(patience / 2)
			if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "k"}}); err != nil {
				t.Fatal(err)
			}
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
	r := &attendance{cluster: k.cluster, namespace: "ns", since: make(map[types.UID]wait)}
	for range 2 {
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "m"}}); err != nil {
			t.Fatal(err)
		}
		k.clock = k.clock.Add(patience)
	}
	m := k.step()
	said := meta.FindStatusCondition(m.Status.Conditions, api.HasFailed)
	if m.Status.Phase != api.Failed || said == nil || !strings.Contains(said.Message, "no agent works on the node here") || !k.get("old", &corev1.Pod{}) || k.get("m", &corev1.Pod{}) {
		t.Errorf("%+v", m.Status)
	}
}
