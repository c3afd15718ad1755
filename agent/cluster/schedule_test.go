// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// tick has the schedule reconciled.
func (k *test) tick() ctrl.Result {
	k.Helper()
	result := k.reconcile(&schedules{k.cluster}, "s")
	return result
}

// all returns the Checkpoints, by their times: "pod@seconds".
func (k *test) all() (found []string) {
	k.Helper()
	var list api.CheckpointList
	k.must(k.client.List(k.Context(), &list))
	for _, c := range list.Items {
		at := int64(0)
		if _, err := fmt.Sscan(c.Name[strings.LastIndex(c.Name, "-")+1:], &at); err != nil {
			k.Fatal(err)
		}
		found = append(found, fmt.Sprintf("%s@%d", c.Spec.Pod, at-start.Unix()))
	}
	slices.Sort(found)
	return found
}

// over ends all Checkpoints that are not over.
func (k *test) over(phase api.Phase) {
	k.Helper()
	var list api.CheckpointList
	k.must(k.client.List(k.Context(), &list))
	for _, c := range list.Items {
		if !c.Status.Phase.Over() {
			c.Status.Phase = phase
			k.must(k.client.Status().Update(k.Context(), &c))
		}
	}
}

func schedule(change func(*api.ScheduleSpec)) *api.CheckpointSchedule {
	s := &api.CheckpointSchedule{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s", CreationTimestamp: metav1.NewTime(start)}, Spec: api.ScheduleSpec{
		Schedule: "@every 10m", Keep: 2, KeepImages: true, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a"}},
		Checkpoint: api.Template{Repository: "r/job", PushSecret: "s", TimeoutSeconds: 7},
	}}
	if change != nil {
		change(&s.Spec)
	}
	return s
}

func TestSchedule(t *testing.T) {
	second := running("b", "here")
	second.UID = "abcdefgh-i"
	other := running("c", "here")
	other.Labels = nil
	pending := running("d", "")
	pending.UID, pending.Status.Phase = "d", corev1.PodPending
	k := newTest(t, running("a", "here"), second, other, pending, schedule(nil))
	want := func(want ...string) {
		t.Helper()
		if got := k.all(); !slices.Equal(got, want) {
			t.Fatalf("there are %v, want %v", got, want)
		}
	}
	if r := k.tick(); r.RequeueAfter != 10*time.Minute {
		t.Errorf("it comes again after %s", r.RequeueAfter)
	}
	want()
	k.clock = start.Add(10 * time.Minute)
	if r := k.tick(); r.RequeueAfter != 10*time.Minute {
		t.Errorf("it comes again after %s", r.RequeueAfter)
	}
	k.tick()
	want("a@600", "b@600")
	// The ones before are not over.
	k.clock = start.Add(20 * time.Minute)
	k.tick()
	want("a@600", "b@600")
	k.over(api.Succeeded)
	// Nobody looked for an hour.
	k.clock = start.Add(81 * time.Minute)
	if r := k.tick(); r.RequeueAfter != 9*time.Minute {
		t.Errorf("it comes again after %s", r.RequeueAfter)
	}
	want("a@1800", "a@600", "b@1800", "b@600")
	// One that fails takes the place of none that succeeded.
	k.over(api.Failed)
	k.clock = start.Add(90 * time.Minute)
	k.tick()
	k.over(api.Succeeded)
	k.clock = start.Add(100 * time.Minute)
	k.tick()
	k.over(api.Succeeded)
	k.tick()
	want("a@1800", "a@5400", "a@6000", "b@1800", "b@5400", "b@6000")
	// Suspended, it makes none.
	var s api.CheckpointSchedule
	k.get("s", &s)
	s.Spec.Suspend, s.Spec.Keep = true, 1
	k.must(k.client.Update(t.Context(), &s))
	k.clock = start.Add(200 * time.Minute)
	k.tick()
	want("a@1800", "a@6000", "b@1800", "b@6000")
}

func TestScheduleInvalid(t *testing.T) {
	k := newTest(t, schedule(nil))
	for _, times := range []string{"@every 10m", "every day", "@every 10m", "0 0 30 2 *", "@every 10m", "@every -10m", "CRON_TZ=UTC @every -10m", "TZ=UTC  @every 0s", "CRON_TZ=UTC", "@every 10m"} {
		var s api.CheckpointSchedule
		k.get("s", &s)
		s.Spec.Schedule = times
		k.must(k.client.Update(t.Context(), &s))
		k.tick()
		k.get("s", &s)
		valid := times == "@every 10m"
		if c := s.Status.Conditions; len(c) != 1 || (c[0].Reason == "Valid") != valid || (s.Status.Next != nil) != valid {
			t.Errorf("%s: %+v", times, s.Status)
		}
	}
}

// The image of a Checkpoint that goes is deleted, where the registry allows it; a registry that does
// not is named, and keeps no Checkpoint.
func TestImages(t *testing.T) {
	forbids := false
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "u" || password != "p" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED"}]}`, http.StatusUnauthorized)
			return
		}
		if forbids && r.Method == http.MethodDelete {
			http.Error(w, `{"errors":[{"code":"UNSUPPORTED"}]}`, http.StatusMethodNotAllowed)
			return
		}
		images.ServeHTTP(w, r)
	}))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	login := remote.WithAuth(&authn.Basic{Username: "u", Password: "p"})
	for _, forbids = range []bool{false, true} {
		image, err := random.Image(10, 1)
		if err != nil {
			t.Fatal(err)
		}
		tag, err := name.NewTag(host + "/job:1")
		if err == nil {
			err = remote.Write(tag, image, login)
		}
		if err != nil {
			t.Fatal(err)
		}
		digest, err := image.Digest()
		if err != nil {
			t.Fatal(err)
		}
		k := newTest(t,
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s"}, Data: map[string][]byte{
				corev1.DockerConfigJsonKey: fmt.Appendf(nil, `{"auths":{%q:{"auth":"dTpw"}}}`, host),
			}},
			&api.Checkpoint{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", Finalizers: []string{api.ImageFinalizer}},
				Spec:       api.Spec{Repository: host + "/job", PushSecret: "s"},
				Status:     api.Status{Phase: api.Succeeded, Containers: []api.Container{{Digest: digest.String()}}},
			})
		prune := func() {
			t.Helper()
			if _, err := (&pruner{k.cluster, true}).Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "k"}}); err != nil {
				t.Fatal(err)
			}
		}
		there := func() bool {
			_, err := remote.Head(tag.Context().Digest(digest.String()), login)
			return err == nil
		}
		prune()
		var c api.Checkpoint
		if !there() || !k.get("k", &c) {
			t.Fatal("it is gone before it is deleted")
		}
		k.must(k.client.Delete(t.Context(), &c))
		prune()
		if there() != forbids || k.get("k", &c) || len(k.events.Events) != map[bool]int{true: 1}[forbids] {
			t.Errorf("forbidden %t: the image is there: %t; %d events", forbids, there(), len(k.events.Events))
		}
	}
}
