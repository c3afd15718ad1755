// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/criu"
)

func TestNetworks(t *testing.T) {
	shared := func(d *criu.Dump) { d.Inventory.RootIds.NetNsId = d.Tasks[0].IDs.NetNsId }
	made := func(*criu.Dump) {}
	given := func(d *criu.Dump) { d.NetworkGiven = true }
	inHost := []specs.LinuxNamespace{}
	inHostByPath := []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/proc/self/ns/net"}}
	inMade := []specs.LinuxNamespace{{Type: specs.NetworkNamespace}}
	inGiven := []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/run/netns/some"}}
	for name, c := range map[string]struct {
		dump func(*criu.Dump)
		spec []specs.LinuxNamespace
		says string // "" when it is granted
	}{
		"host to host":    {shared, inHost, ""},
		"host to path":    {shared, inHostByPath, ""},
		"host to made":    {shared, inMade, "host's network namespace"},
		"host to given":   {shared, inGiven, "host's network namespace"},
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
			if _, err := Check(spec, d, host); c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
}
