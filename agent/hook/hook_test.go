// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// reads is a cluster that tells of each time that it is asked for a Checkpoint. It does not answer the
// first questions of each kind.
type reads struct {
	client.Client
	asked       chan struct{}
	gets, lists int // that are not answered
	err         error
}

func (r *reads) Get(ctx context.Context, key client.ObjectKey, to client.Object, options ...client.GetOption) error {
	select {
	case r.asked <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	if r.gets--; r.gets >= 0 {
		return r.err
	}
	return r.Client.Get(ctx, key, to, options...)
}

func (r *reads) List(ctx context.Context, to client.ObjectList, options ...client.ListOption) error {
	if r.lists--; r.lists >= 0 {
		return r.err
	}
	return r.Client.List(ctx, to, options...)
}

// A hook is answered when the Checkpoints of the pods that end are over, with what came of them.
// Pods that end otherwise, or have another hook or node, are not waited for.
func TestHook(t *testing.T) {
	for _, c := range []struct {
		name, path string
		uid        int // the kubelet's
		change     func(*corev1.Pod)
		phase      api.Phase
		code       int
		waits      bool
		asks       int   // for the Checkpoint and the pod, if it does not wait
		away       error // of the API server, at first
	}{
		{name: "succeeds", phase: api.Succeeded, code: http.StatusOK, waits: true},
		{name: "fails", phase: api.Failed, code: http.StatusInternalServerError, waits: true},
		{name: "is deleted", code: http.StatusInternalServerError, waits: true},
		{name: "is refused", phase: api.Failed, code: http.StatusInternalServerError, asks: 2, change: func(p *corev1.Pod) { p.Annotations[api.Refused] = "broken" }},
		{name: "the API server is away", phase: api.Succeeded, code: http.StatusOK, waits: true, away: syscall.ECONNREFUSED},
		{name: "the API server refuses", code: http.StatusInternalServerError, away: apierrors.NewForbidden(corev1.Resource("pods"), "", nil)},
		{name: "deleted", change: func(p *corev1.Pod) { p.Status.Conditions = nil }, code: http.StatusOK},
		{name: "runs on", change: func(p *corev1.Pod) { p.DeletionTimestamp, p.Status.Conditions = nil, nil }, code: http.StatusOK},
		{name: "another hook", path: "/checkpoint/ns/other", code: http.StatusOK},
		{name: "another namespace's", path: "/checkpoint/other", code: http.StatusOK, change: func(p *corev1.Pod) {
			p.Spec.Containers[0].Lifecycle.PreStop.HTTPGet.Path = "/checkpoint/other"
		}},
		{name: "no namespace", path: "/checkpoint", code: http.StatusNotFound},
		{name: "another user", uid: os.Getuid() + 1, code: http.StatusForbidden},
		{name: "another node", change: func(p *corev1.Pod) { p.Spec.NodeName = "there" }, code: http.StatusOK},
	} {
		t.Run(c.name, func(t *testing.T) {
			now := metav1.Now()
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "job", UID: "12345678-9", DeletionTimestamp: &now, Finalizers: []string{"t/t"}, Annotations: map[string]string{api.OnEviction: api.DoCheckpoint}},
				Spec: corev1.PodSpec{NodeName: "here", Containers: []corev1.Container{{Name: "main", Lifecycle: &corev1.Lifecycle{
					PreStop: &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/checkpoint/ns"}},
				}}}},
				Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}},
			}
			if c.change != nil {
				c.change(pod)
			}
			scheme := runtime.NewScheme()
			if err := errors.Join(api.AddTo(scheme), corev1.AddToScheme(scheme)); err != nil {
				t.Fatal(err)
			}
			cluster := &reads{asked: make(chan struct{}), err: c.away, Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(pod).WithStatusSubresource(&api.Checkpoint{}).
				WithIndex(&corev1.Pod{}, "spec.nodeName", func(o client.Object) []string { return []string{o.(*corev1.Pod).Spec.NodeName} }).Build()}
			if c.away != nil {
				cluster.gets, cluster.lists = 2, 3
			}
			path := c.path
			if path == "" {
				path = "/checkpoint/ns"
			}
			server := httptest.NewServer(&Server{Cluster: cluster, Node: "here", Settle: time.Second, UID: cmp.Or(c.uid, os.Getuid())})
			defer server.Close()
			ctx, hangUp := context.WithCancel(t.Context())
			defer hangUp() // else Close waits for the answer
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			var code int
			var body []byte
			answered := make(chan error, 1)
			go func() {
				answer, err := http.DefaultClient.Do(request)
				if err == nil {
					code = answer.StatusCode
					body, err = io.ReadAll(answer.Body)
					_ = answer.Body.Close()
				}
				answered <- err
			}()
			if c.waits {
				// It asks again while there is no Checkpoint, and while there is one that is not over.
				<-cluster.asked
				<-cluster.asked
				k := &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "job-12345678"}}
				if err := cluster.Create(t.Context(), k); err != nil {
					t.Fatal(err)
				}
				<-cluster.asked
				<-cluster.asked
				k.Status = api.Status{Phase: c.phase, Conditions: []metav1.Condition{{Type: api.HasFailed, Message: "broken"}}}
				end := cluster.Status().Update(t.Context(), k)
				if c.phase == "" {
					end = cluster.Delete(t.Context(), k)
				}
				if end != nil {
					t.Fatal(end)
				}
			}
			asked := 0
			for done := false; !done; {
				select {
				case <-cluster.asked:
					if asked++; !c.waits && asked > c.asks {
						t.Fatal("it waits for a Checkpoint")
					}
				case err := <-answered:
					if err != nil {
						t.Fatal(err)
					}
					done = true
				}
			}
			if code != c.code || c.phase == api.Failed && !strings.Contains(string(body), "broken") {
				t.Errorf("it answers %d, %s", code, body)
			}
		})
	}
}

// An agent that is told to end answers first.
func TestAnswersBeforeItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{Cluster: &reads{lists: math.MaxInt, err: syscall.ECONNREFUSED}}
		toEnd, end := context.WithCancel(t.Context())
		called, hangUp := context.WithCancel(t.Context())
		ends := s.Outlive(toEnd)
		go func() { _ = s.wait(called, "ns", "/checkpoint/ns") }()
		synctest.Wait()
		end()
		synctest.Wait()
		if ends.Err() != nil {
			t.Error("it ends while a hook waits")
		}
		hangUp()
		<-ends.Done()
	})
}

// When the grace period is over the kubelet hangs up.
func TestHookEnds(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(api.AddTo(scheme), corev1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "job", UID: "1"}}
	err := (&Server{Cluster: fake.NewClientBuilder().WithScheme(scheme).Build()}).checkpointed(ctx, pod)
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A process is found by its addresses, of either version.
func TestInProc(t *testing.T) {
	for address, want := range map[string]string{
		"127.0.0.1:9403": "0100007F:24BB",
		"[::1]:9403":     "00000000000000000000000001000000:24BB",
	} {
		if got := inProc(netip.MustParseAddrPort(address)); got != want {
			t.Errorf("%s is %s, want %s", address, got, want)
		}
	}
}
