// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hook is where pods wait for their checkpoint before they end: their preStop hook asks the
// agent of their node, and the kubelet lets the pod run on until the answer, for as long as its grace
// period lasts.
package hook

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

const (
	// look is how often the server looks at what has changed.
	look = 200 * time.Millisecond
	// longest is how long a hook is kept waiting: as long as a checkpoint and its push may take.
	longest = 2 * time.Hour
)

// Server answers preStop hooks of the node's kubelet. A hook does not say of which pod it is, so pods are
// found by its path, which begins with /checkpoint/NAMESPACE: those of others wait for none of it.
type Server struct {
	// Cluster has pods and Checkpoints as the API server has them.
	Cluster client.Reader
	Node    string // the node's name
	// Settle is how long the API server may take to say that a pod ends whose hook is here.
	Settle time.Duration
	// UID is the kubelet's user, which no other may be.
	UID int

	waiting atomic.Int32 // hooks
}

// Outlive returns a context that ends after another one, when no hook waits any more: the kubelet does not ask
// the next agent.
func (s *Server) Outlive(ctx context.Context) context.Context {
	longer, end := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		<-ctx.Done()
		for s.waiting.Load() > 0 {
			time.Sleep(look)
		}
		end()
	}()
	return longer
}

// ServeHTTP answers when the Checkpoints of all pods of the node and the namespace are over that end and
// have a hook with the path. The answer is 200 if there are none, or all have succeeded.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !local(r, s.UID) {
		http.Error(w, "only the node's kubelet is answered", http.StatusForbidden)
		return
	}
	rest, ok := strings.CutPrefix(r.URL.Path, api.HookPath)
	namespace, _, _ := strings.Cut(rest, "/")
	if !ok || namespace == "" {
		http.Error(w, "the path of the preStop hook must begin with "+api.HookPath+"NAMESPACE, the pod's", http.StatusNotFound)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), longest)
	defer cancel()
	if err := s.wait(ctx, namespace, r.URL.Path); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	fmt.Fprintln(w, "done")
}

func (s *Server) wait(ctx context.Context, namespace, path string) error {
	s.waiting.Add(1)
	defer s.waiting.Add(-1)
	pods, err := s.ending(ctx, namespace, path)
	if err != nil {
		return err
	}
	var errs []error
	for _, pod := range pods {
		errs = append(errs, s.checkpointed(ctx, &pod))
	}
	return errors.Join(errs...)
}

// ending returns the pods that are to be checkpointed. None is right after a deletion for which
// nobody wants a checkpoint, and after a restart of a container, which the API server never hears of.
func (s *Server) ending(ctx context.Context, namespace, path string) (found []corev1.Pod, err error) {
	for began := time.Now(); ; {
		var pods corev1.PodList
		err := s.Cluster.List(ctx, &pods, client.InNamespace(namespace), client.MatchingFields{"spec.nodeName": s.Node})
		if api.Passes(err) && ctx.Err() == nil {
			began = time.Now() // it is asked again, as long as the pod's grace period lasts
		} else if err != nil {
			return nil, fmt.Errorf("list the pods of the node: %w", err)
		}
		deleted := false
		for _, pod := range pods.Items {
			switch {
			case !slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool { return api.HookOf(&c) == path }):
			case api.Ending(&pod) != "":
				found = append(found, pod)
			case pod.DeletionTimestamp != nil:
				deleted = true
			}
		}
		if len(found) > 0 || deleted || time.Since(began) > s.Settle {
			return found, nil
		}
		if err := pause(ctx); err != nil {
			return nil, err
		}
	}
}

// checkpointed waits until the Checkpoint of a pod is over, or the controller says that none is made.
func (s *Server) checkpointed(ctx context.Context, pod *corev1.Pod) error {
	key := client.ObjectKey{Namespace: pod.Namespace, Name: api.EvictionName(pod.Name, string(pod.UID))}
	for made := false; ; {
		var k api.Checkpoint
		err := s.Cluster.Get(ctx, key, &k)
		if client.IgnoreNotFound(err) != nil && (!api.Passes(err) || ctx.Err() != nil) {
			return fmt.Errorf("read the Checkpoint %s: %w", key, err)
		}
		if err == nil && k.Status.Phase == api.Succeeded {
			return nil
		}
		if err == nil && k.Status.Phase == api.Failed {
			return fmt.Errorf("the pod %s ends without a checkpoint: %s", key, k.WhyFailed())
		}
		if made = made || err == nil; made && apierrors.IsNotFound(err) {
			return fmt.Errorf("the pod %s ends without a checkpoint: its Checkpoint was deleted", key)
		}
		var now corev1.Pod
		if apierrors.IsNotFound(err) && s.Cluster.Get(ctx, client.ObjectKeyFromObject(pod), &now) == nil && now.Annotations[api.Refused] != "" {
			return fmt.Errorf("the pod %s ends without a checkpoint: %s", key, now.Annotations[api.Refused])
		}
		if err := pause(ctx); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(look):
		return nil
	}
}
