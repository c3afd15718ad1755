// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
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

// Schedule binds pods that name no node, as a cluster's scheduler would, until the context ends. Each
// goes to the first node of the cluster that it may go to, by the nodes' labels and names.
func (n *Node) Schedule(ctx context.Context) error {
	for {
		err := n.schedule(ctx)
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

func (n *Node) schedule(ctx context.Context) error {
	var pods struct{ Items []pending }
	if err := n.list(ctx, &pods, "pods", "--all-namespaces", "--field-selector", "spec.nodeName="); err != nil {
		return fmt.Errorf("find pods without a node: %w", err)
	}
	var places struct{ Items []place }
	for _, pod := range pods.Items {
		if len(pod.Spec.SchedulingGates) > 0 {
			continue
		}
		if len(places.Items) == 0 {
			if err := n.list(ctx, &places, "nodes"); err != nil {
				return fmt.Errorf("find nodes: %w", err)
			}
			slices.SortFunc(places.Items, func(a, b place) int { return strings.Compare(a.Metadata.Name, b.Metadata.Name) })
		}
		if i := slices.IndexFunc(places.Items, pod.fits); i >= 0 {
			if err := n.bind(ctx, pod, places.Items[i].Metadata.Name); err != nil {
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
func (n *Node) list(ctx context.Context, to any, args ...string) error {
	out, err := n.Kubectl(ctx, append([]string{"get", "--output", "json"}, args...)...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), to)
}

// bind binds a pod to a node. A pod that is gone meanwhile needs none.
func (n *Node) bind(ctx context.Context, pod pending, to string) error {
	data, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Binding",
		"metadata": map[string]string{"name": pod.Metadata.Name},
		"target":   map[string]string{"apiVersion": "v1", "kind": "Node", "name": to},
	})
	if err != nil {
		return err
	}
	file := filepath.Join(n.Dir(), "binding.json")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return err
	}
	_, err = n.Kubectl(ctx, "create", "--raw", "/api/v1/namespaces/"+pod.Metadata.Namespace+"/pods/"+pod.Metadata.Name+"/binding", "-f", file)
	// Also one that ends meanwhile is not bound.
	if err != nil && (strings.Contains(err.Error(), "not found") || strings.Contains(err.Error(), "is being deleted")) {
		return nil
	}
	return err
}
