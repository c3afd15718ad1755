// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpuckpt/gpuckpt/agent/api"
	"github.com/gpuckpt/gpuckpt/agent/turns"
)

// pruning returns what the deletion of a Checkpoint's image comes to, at a registry that answers so.
func pruning(t *testing.T, registry http.HandlerFunc) error {
	t.Helper()
	there := httptest.NewServer(registry)
	t.Cleanup(there.Close)
	return pruningAt(t, strings.TrimPrefix(there.URL, "http://"), true)
}

// pruningAt is pruning at a host.
func pruningAt(t *testing.T, host string, plainHTTP bool) error {
	t.Helper()
	digest := "sha256:" + strings.Repeat("a", 64)
	k := newTest(t, &api.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", Finalizers: []string{api.ImageFinalizer}},
		Spec:       api.Spec{Repository: host + "/job"},
		Status:     api.Status{Phase: api.Succeeded, Containers: []api.Container{{Digest: digest}}},
	})
	k.must(k.client.Delete(t.Context(), &api.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k"}}))
	k.clock = time.Now()
	_, err := (&pruner{k.cluster, plainHTTP}).Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "k"}})
	return err
}

// A registry that says nothing is not waited for any longer than it takes others.
func TestPruneOfASilentRegistry(t *testing.T) {
	usual := pruneTry
	pruneTry = 200 * time.Millisecond
	t.Cleanup(func() { pruneTry = usual })
	err := pruning(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-time.After(20 * time.Second): // who still waits finds that all went well
		}
	})
	if err == nil || !strings.Contains(err.Error(), "the registry has not answered within") {
		t.Errorf("it was waited for: %v", err)
	}
}

// An image that an agent may push yet is waited for, and one whose secret is gone is left at once. Where none was
// pushed, none is said to be left.
func TestPruneWhile(t *testing.T) {
	for phase, stays := range map[api.Phase]bool{api.Running: true, api.Succeeded: false, api.Failed: false} {
		now := metav1.Now()
		checkpoint := &api.Checkpoint{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "k", Finalizers: []string{api.ImageFinalizer}, DeletionTimestamp: &now},
			Spec:       api.Spec{Repository: "r.example.com/job", PushSecret: "gone"}, Status: api.Status{Phase: phase},
		}
		if phase == api.Succeeded {
			checkpoint.Status.Containers = []api.Container{{}}
		}
		k := newTest(t, checkpoint)
		_, err := (&pruner{k.cluster, true}).Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "k"}})
		if there := k.get("k", &api.Checkpoint{}); err != nil || there != stays || len(k.events.Events) > 0 != (phase == api.Succeeded) {
			t.Errorf("%s: %v, it is there: %t, %d events", phase, err, there, len(k.events.Events))
		}
	}
}

// A registry that has no time for it is asked again.
func TestPruneOfABusyRegistry(t *testing.T) {
	if pruning(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) }) == nil {
		t.Error("its image is left")
	}
}

// A registry whose certificate no known authority has issued is not asked again: that does not pass.
func TestPruneUntrusted(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.2:0") // at 127.0.0.1, go-containerregistry asks without TLS, too
	if err != nil {
		t.Fatal(err)
	}
	there := httptest.NewUnstartedServer(http.NotFoundHandler())
	there.Listener.Close()
	there.Listener = listener
	there.StartTLS()
	defer there.Close()
	if err := pruningAt(t, listener.Addr().String(), false); err != nil {
		t.Errorf("it is asked again: %v", err)
	}
}

// A registry has the controller ask nothing of another host, but for a token, and nothing of its own.
func TestPruneElsewhere(t *testing.T) {
	var asked atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer other.Close()
	by := strings.Replace(other.URL, "127.0.0.1", "localhost", 1) // a name, which go-containerregistry lets pass
	for says, answer := range map[string]http.HandlerFunc{
		"the registry wants the image deleted at another host": func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodDelete {
				http.Redirect(w, r, by+"/v1/kv/anything", http.StatusTemporaryRedirect)
			}
		},
		"the registry names an address of the controller's own": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="`+by+`/latest/meta-data",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		},
	} {
		if err := pruning(t, answer); err == nil || !strings.Contains(err.Error(), says) || asked.Load() > 0 {
			t.Errorf("%v, after %d requests to another host; want %q", err, asked.Load(), says)
		}
	}
	for _, at := range []string{"127.0.0.1:1", "[::ffff:127.0.0.1]:1", "169.254.169.254:80", "[fd00:ec2::254]:80", "100.100.100.200:80", "[::ffff:168.63.129.16]:80"} {
		if c, err := elsewhere.DialContext(t.Context(), "tcp", at); err == nil || !strings.Contains(err.Error(), "an address of the controller's own") {
			t.Errorf("%s: %v, %v", at, c, err)
		}
	}
}

// What one namespace has at work, of any kind, keeps no other's waiting.
func TestNamespacesShareTheController(t *testing.T) {
	begun, goesOn := make(chan struct{}), make(chan struct{})
	r := new(turns.Turns).Share(reconcile.Func(func(_ context.Context, request ctrl.Request) (ctrl.Result, error) {
		if request.Name == "slow" {
			close(begun)
			<-goesOn
		}
		return ctrl.Result{}, nil
	}))
	reconcile := func(namespace, name string) time.Duration {
		result, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: namespace, Name: name}})
		if err != nil {
			t.Error(err)
		}
		return result.RequeueAfter
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		reconcile("first", "slow")
	}()
	<-begun
	if reconcile("second", "k") != 0 || reconcile("first", "k") != turns.Next {
		t.Error("the second namespace waits, or the first has two turns")
	}
	close(goesOn)
	<-ended
	if reconcile("first", "k") != 0 {
		t.Error("the first namespace's turn has not ended")
	}
}
