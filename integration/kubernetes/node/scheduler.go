// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"
)

// pending is what the scheduler looks at of a pod without a node.
type pending struct {
	Metadata struct{ Namespace, Name string }
	Spec     struct {
		SchedulingGates []any
		NodeSelector    map[string]string
		Affinity        struct {
			NodeAffinity struct {
				Required struct {
					NodeSelectorTerms []struct {
						MatchFields []struct {
							Key, Operator string
							Values        []string
						}
					}
				} `json:"requiredDuringSchedulingIgnoredDuringExecution"`
			}
		}
	}
}

// place is what the scheduler looks at of a node.
type place struct {
	Metadata struct {
		Name   string
		Labels map[string]string
	}
	Spec struct{ Unschedulable bool }
}

// scheduler talks to the API server itself: a kubectl for each look would take a good part of a core.
type scheduler struct {
	server string // https://HOST:PORT
	client *http.Client
}

// Schedule binds pods that name no node, as a cluster's scheduler would, until the context ends. Each
// goes to the first node of the cluster that it may go to, by the nodes' labels and names.
func (n *Node) Schedule(ctx context.Context) error {
	client, err := n.authority.client(adminUser)
	if err != nil {
		return err
	}
	s := scheduler{"https://" + n.api.address, client}
	for {
		err := s.schedule(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if pause(ctx, 200*time.Millisecond) != nil {
			return nil
		}
	}
}

func (s scheduler) schedule(ctx context.Context) error {
	var pods struct{ Items []pending }
	if err := s.list(ctx, &pods, "/api/v1/pods?fieldSelector=spec.nodeName%3D"); err != nil {
		return fmt.Errorf("find pods without a node: %w", err)
	}
	var places struct{ Items []place }
	for _, pod := range pods.Items {
		if len(pod.Spec.SchedulingGates) > 0 {
			continue
		}
		if len(places.Items) == 0 {
			if err := s.list(ctx, &places, "/api/v1/nodes"); err != nil {
				return fmt.Errorf("find nodes: %w", err)
			}
			slices.SortFunc(places.Items, func(a, b place) int { return strings.Compare(a.Metadata.Name, b.Metadata.Name) })
		}
		if i := slices.IndexFunc(places.Items, pod.fits); i >= 0 {
			if err := s.bind(ctx, pod, places.Items[i].Metadata.Name); err != nil {
				return fmt.Errorf("bind the pod %s: %w", pod.Metadata.Name, err)
			}
		}
	}
	return nil
}

// fits reports whether a pod may go to a node. A pod that is for one node, such as a DaemonSet's, may
// go to it also when it takes no others.
func (p pending) fits(to place) bool {
	for label, value := range p.Spec.NodeSelector {
		if to.Metadata.Labels[label] != value {
			return false
		}
	}
	named := false
	for _, term := range p.Spec.Affinity.NodeAffinity.Required.NodeSelectorTerms {
		for _, field := range term.MatchFields {
			if slices.Contains(field.Values, to.Metadata.Name) != (field.Operator == "In") {
				return false
			}
			named = named || field.Operator == "In"
		}
	}
	return named || !to.Spec.Unschedulable
}

// list reads objects.
func (s scheduler) list(ctx context.Context, to any, path string) error {
	out, err := s.ask(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	return json.Unmarshal(out, to)
}

// bind binds a pod to a node. A pod that is gone meanwhile needs none.
func (s scheduler) bind(ctx context.Context, pod pending, to string) error {
	data, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Binding",
		"metadata": map[string]string{"name": pod.Metadata.Name},
		"target":   map[string]string{"apiVersion": "v1", "kind": "Node", "name": to},
	})
	if err != nil {
		return err
	}
	_, err = s.ask(ctx, http.MethodPost, "/api/v1/namespaces/"+pod.Metadata.Namespace+"/pods/"+pod.Metadata.Name+"/binding", data)
	// Also one that ends meanwhile is not bound.
	if err != nil && (strings.Contains(err.Error(), "not found") || strings.Contains(err.Error(), "is being deleted")) {
		return nil
	}
	return err
}

// ask sends a request to the API server. What it refuses is an error with its words.
func (s scheduler) ask(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, method, s.server+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	answer, err := s.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	out, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode >= http.StatusBadRequest {
		err = fmt.Errorf("%s: %s", answer.Status, out)
	}
	return out, err
}
