// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"testing"
	"testing/synctest"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// notes is a ring that notes what is asked of it.
type notes struct {
	key     string
	trusted map[string][]string
	missing int // so often there is no key yet
}

func (n *notes) Key(context.Context) (string, error) {
	if n.missing--; n.missing >= 0 {
		return "", errors.New("gpuckpt is not installed on this node")
	}
	return n.key, nil
}

func (n *notes) Trust(keys map[string][]string) error {
	n.trusted = keys
	return nil
}

// A node's key is made known once, and with those that it had before when it is another. All that are
// known count.
func TestKeys(t *testing.T) {
	cluster := world(t, &api.NodeKey{ObjectMeta: metav1.ObjectMeta{Name: "there"}, Spec: api.NodeKeySpec{Keys: []string{"theirs"}}}).Build()
	n := &notes{}
	r := &keys{client: cluster, direct: cluster, node: "here", ring: n}
	want := []string{}
	for i := range api.MaxKeys + 2 {
		n.key = fmt.Sprint("key", i)
		want = append(want, n.key)
		for range 2 {
			if err := r.publish(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := r.Reconcile(t.Context(), ctrl.Request{}); err != nil {
		t.Fatal(err)
	}
	equal := func(a, b []string) bool { return fmt.Sprint(a) == fmt.Sprint(b) }
	if all := map[string][]string{"there": {"theirs"}, "here": want[2:]}; !maps.EqualFunc(n.trusted, all, equal) {
		t.Errorf("trusted are %v, want %v", n.trusted, all)
	}
}

// The key of a node on which gpuckpt is being installed is known seconds after that.
func TestKeyOfNewNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := world(t).Build()
		r := &keys{client: cluster, direct: cluster, node: "here", ring: &notes{key: "ours", missing: 4}}
		ctx, cancel := context.WithTimeout(t.Context(), again/2)
		defer cancel()
		if err := r.Start(ctx); err != nil {
			t.Fatal(err)
		}
		var known api.NodeKey
		if err := cluster.Get(t.Context(), types.NamespacedName{Name: "here"}, &known); err != nil {
			t.Error(err)
		}
	})
}
