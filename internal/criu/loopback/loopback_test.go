// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package loopback

import (
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// The hook brings the interface up in the network of the process that it is told of,
// and asks for one.
func TestHook(t *testing.T) {
	for name, c := range map[string]struct {
		namespaces []specs.LinuxNamespace
		hooks      int
	}{
		"host":  {nil, 0},
		"made":  {[]specs.LinuxNamespace{{Type: specs.NetworkNamespace}}, 1},
		"given": {[]specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/run/netns/some"}}, 0},
	} {
		spec := &specs.Spec{Linux: &specs.Linux{Namespaces: c.namespaces}}
		if err := Hook(spec); err != nil {
			t.Fatal(err)
		}
		got := 0
		if spec.Hooks != nil {
			got = len(spec.Hooks.CreateRuntime)
		}
		if got != c.hooks {
			t.Errorf("%s: %d hooks, want %d", name, got, c.hooks)
		}
	}
	for _, state := range []string{"", "{}", `{"pid": -1}`, "no state"} {
		if err := up(strings.NewReader(state)); err == nil {
			t.Errorf("the state %q is accepted", state)
		}
	}
}
