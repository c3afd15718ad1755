// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/netdev"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
)

func TestNetworks(t *testing.T) {
	host := func(d *dumped) { d.inventory.RootIds.NetNsId = d.tasks[0].ids.NetNsId }
	made := func(*dumped) {}
	given := func(d *dumped) { d.networkGiven = true }
	inHost := []specs.LinuxNamespace{}
	inHostByPath := []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/proc/self/ns/net"}}
	inMade := []specs.LinuxNamespace{{Type: specs.NetworkNamespace}}
	inGiven := []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/run/netns/some"}}
	for name, c := range map[string]struct {
		dump func(*dumped)
		spec []specs.LinuxNamespace
		says string // "" when it is granted
	}{
		"host to host":    {host, inHost, ""},
		"host to path":    {host, inHostByPath, ""},
		"host to made":    {host, inMade, "host's network namespace"},
		"host to given":   {host, inGiven, "host's network namespace"},
		"made to made":    {made, inMade, ""},
		"made to host":    {made, inHost, "the container has the host's"},
		"made to path":    {made, inHostByPath, "the container has the host's"},
		"made to given":   {made, inGiven, "the container has a network that is there before"},
		"given to given":  {given, inGiven, ""},
		"given to host":   {given, inHost, "the container has the host's"},
		"given to made":   {given, inMade, "the container has a network that the runtime makes"},
		"given to a path": {given, inHostByPath, "the container has the host's"},
	} {
		t.Run(name, func(t *testing.T) {
			spec, d := specOfTest(), dumpOfTest()
			spec.Linux.Namespaces = append([]specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}}, c.spec...)
			c.dump(d)
			if _, err := compareGrants(spec, d); c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
}

func TestReadNetwork(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "netns-12.img")
	if given, err := readNetwork(&imageDir{path: dir, left: maxImages}, 12); given || err != nil {
		t.Errorf("no image: got %v, %v", given, err)
	}
	for name, c := range map[string]struct {
		data    []byte
		given   bool
		damaged bool
	}{
		"CRIU's own":     {image(t, magicNetwork, &netdev.NetnsEntry{}), false, false},
		"to be given":    {image(t, magicNetwork, &netdev.NetnsEntry{ExtKey: proto.String("extRootNetNS")}), true, false},
		"another's":      {image(t, magicCore, &netdev.NetnsEntry{}), false, true},
		"twice":          {image(t, magicNetwork, &netdev.NetnsEntry{}, &netdev.NetnsEntry{}), false, true},
		"without any":    {image(t, magicNetwork), false, true},
		"nothing at all": {nil, false, true},
	} {
		if err := os.WriteFile(file, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		if given, err := readNetwork(&imageDir{path: dir, left: maxImages}, 12); given != c.given || errors.Is(err, images.ErrDamaged) != c.damaged || err != nil && !c.damaged {
			t.Errorf("%s: got %v, %v", name, given, err)
		}
	}
}

// The hook brings the interface up in the network of the process that it is told of,
// and asks for one.
func TestHookLoopback(t *testing.T) {
	for name, c := range map[string]struct {
		namespaces []specs.LinuxNamespace
		hooks      int
	}{
		"host":  {nil, 0},
		"made":  {[]specs.LinuxNamespace{{Type: specs.NetworkNamespace}}, 1},
		"given": {[]specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/run/netns/some"}}, 0},
	} {
		spec := &specs.Spec{Linux: &specs.Linux{Namespaces: c.namespaces}}
		hookLoopback(spec)
		got := 0
		if spec.Hooks != nil {
			got = len(spec.Hooks.CreateRuntime)
		}
		if got != c.hooks {
			t.Errorf("%s: %d hooks, want %d", name, got, c.hooks)
		}
	}
	for _, state := range []string{"", "{}", `{"pid": -1}`, "no state"} {
		if err := loopbackUp(strings.NewReader(state)); err == nil {
			t.Errorf("the state %q is accepted", state)
		}
	}
}
