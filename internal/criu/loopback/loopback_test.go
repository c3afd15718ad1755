// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package loopback

import (
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// The hook is there for a network that runc makes, and for sysctls of a network. It asks for a process, and
// sets no other sysctls.
func TestHook(t *testing.T) {
	for name, c := range map[string]struct {
		linux specs.Linux
		args  []string
	}{
		"host":    {specs.Linux{}, nil},
		"made":    {specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.NetworkNamespace}}}, []string{hook, "up"}},
		"given":   {specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/run/netns/some"}}}, nil},
		"sysctls": {specs.Linux{Sysctl: map[string]string{"net.core.somaxconn": "5", "kernel.shmmax": "9"}}, []string{hook, "net/core/somaxconn=5"}},
	} {
		spec := &specs.Spec{Linux: &c.linux}
		if err := Hook(spec); err != nil {
			t.Fatal(err)
		}
		var got []string
		if spec.Hooks != nil {
			got = spec.Hooks.CreateRuntime[0].Args
		}
		if !slices.Equal(got, c.args) {
			t.Errorf("%s: the hook is %q, want %q", name, got, c.args)
		}
	}
	for _, state := range []string{"", "{}", `{"pid": -1}`, "no state"} {
		if err := set(strings.NewReader(state), nil); err == nil {
			t.Errorf("the state %q is accepted", state)
		}
	}
	for _, path := range []string{"kernel/hostname", "net/../kernel/hostname", "/proc/sys/kernel/hostname"} {
		if err := write(path, "x"); err == nil || !strings.Contains(err.Error(), "no sysctl of a network") {
			t.Errorf("%s: %v", path, err)
		}
	}
}
