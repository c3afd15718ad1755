// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
)

// The host's later mounts come to a restored container's mounts only where the spec asks for that.
func TestSlaves(t *testing.T) {
	bound := func(options ...string) *specs.Spec {
		return &specs.Spec{Linux: &specs.Linux{}, Mounts: []specs.Mount{{Destination: "/data", Type: "bind", Options: options}}}
	}
	root := func(mode string) *specs.Spec { return &specs.Spec{Linux: &specs.Linux{RootfsPropagation: mode}} }
	for name, c := range map[string]struct {
		spec   *specs.Spec
		at     string
		key    string
		shared uint32
		want   uint32 // the master afterwards
	}{
		"a bind":               {bound("rbind", "ro"), "/data", "/data", 0, 0},
		"a bind that asks":     {bound("rbind", "rslave"), "/data", "/data", 0, 30},
		"one that is shared":   {bound("rbind", "rshared"), "/data", "/data", 31, 30},
		"the root":             {root(""), "/", "", 0, 0},
		"a root that asks":     {root("rslave"), "/", "", 0, 30},
		"one of the program's": {bound("rbind"), "/own", "", 0, 30},
		"without linux":        {&specs.Spec{}, "/", "", 0, 0},
	} {
		m := &mnt.MntEntry{MntId: proto.Uint32(7), Mountpoint: &c.at, MasterId: proto.Uint32(30), SharedId: &c.shared}
		if c.key != "" {
			m.ExtKey = &c.key
		}
		Make(Place{Slaves: slaves(c.spec, []*mnt.MntEntry{m})}, nil).Edit(m)
		if m.GetMasterId() != c.want {
			t.Errorf("%s: master %d, want %d", name, m.GetMasterId(), c.want)
		}
	}
	other := &mnt.MntEntry{MntId: proto.Uint32(8), Mountpoint: new("/"), MasterId: proto.Uint32(30)}
	if Make(Place{}, nil).Edit(other); other.GetMasterId() != 30 {
		t.Error("a mount that is not listed was changed")
	}
}
