// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Schedule binds pods that name no node to this one, as a cluster's scheduler would,
// until the context ends.
func (n *Node) Schedule(ctx context.Context) error {
	for {
		out, err := n.Kubectl(ctx, "get", "pods", "--all-namespaces", "--field-selector", "spec.nodeName=", "--output",
			"jsonpath={range .items[*]}{.metadata.namespace}/{.metadata.name} {end}")
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("find pods without a node: %w", err)
		}
		for pod := range strings.FieldsSeq(out) {
			if err := n.bind(ctx, pod); err != nil && ctx.Err() == nil {
				return fmt.Errorf("bind the pod %s: %w", pod, err)
			}
		}
		if pause(ctx, 200*time.Millisecond) != nil {
			return nil
		}
	}
}

// bind binds a pod, NAMESPACE/NAME. One that is gone meanwhile needs no node.
func (n *Node) bind(ctx context.Context, pod string) error {
	namespace, name, _ := strings.Cut(pod, "/")
	data, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Binding",
		"metadata": map[string]string{"name": name},
		"target":   map[string]string{"apiVersion": "v1", "kind": "Node", "name": Name},
	})
	if err != nil {
		return err
	}
	file := filepath.Join(n.Dir(), "binding.json")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return err
	}
	_, err = n.Kubectl(ctx, "create", "--raw", "/api/v1/namespaces/"+namespace+"/pods/"+name+"/binding", "-f", file)
	if err != nil && strings.Contains(err.Error(), "not found") {
		return nil
	}
	return err
}
