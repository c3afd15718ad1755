// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The container that resumes may not be what the one that was dumped was. What
// its spec does not grant is refused with a reason; what differs otherwise is
// taken from the spec or from the dump.
func TestAnotherSpec(t *testing.T) {
	name := "example.com/grants:1"
	data, other := t.TempDir(), t.TempDir()
	mounts := []specs.Mount{{Type: "bind", Source: data, Destination: "/data", Options: []string{"rbind", "ro"}}}
	port := built(t, shared, name, harness.RunSpec{Mounts: mounts, CtrFlags: []string{"--hostname", "old"}}, "counter")
	for _, c := range []struct {
		name   string
		mounts []specs.Mount
		flags  []string
		own    bool
		says   string // empty: it is resumed
	}{
		{name: "the same", mounts: mounts},
		{name: "another source and hostname", mounts: []specs.Mount{{Type: "bind", Source: other, Destination: "/data", Options: []string{"rbind", "ro"}}}, flags: []string{"--hostname", "new", "--env", "A=B"}},
		{name: "a mount more", mounts: append(mounts, specs.Mount{Type: "bind", Source: other, Destination: "/other", Options: []string{"rbind", "ro"}})},
		{name: "more capabilities", mounts: mounts, flags: []string{"--cap-add", "CAP_SYS_ADMIN"}},
		{name: "a mount less", says: "mount /data of the dump is missing in the spec"},
		{name: "a capability less", mounts: mounts, flags: []string{"--cap-drop", "CAP_NET_RAW"}, says: "CAP_NET_RAW"},
		{name: "seccomp", mounts: mounts, flags: []string{"--seccomp"}, says: "weaker than the spec's profile"},
		{name: "own network", mounts: mounts, own: true, says: "host's network namespace"},
	} {
		t.Run(c.name, func(t *testing.T) {
			k, err := tryStart(t, harness.RunSpec{Image: name, Port: port, Annotations: asked, Mounts: c.mounts, CtrFlags: c.flags, OwnNetwork: c.own}, "counter")
			if c.says != "" {
				harness.Says(t, err, c.says)
				return
			}
			if err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			k.Expect(t, "count", "102")
		})
	}
}

// Containers with seccomp, cgroups to read and a network of their own resume in
// the same.
func TestTheSameSpec(t *testing.T) {
	for i, c := range []struct {
		name string
		spec harness.RunSpec
	}{
		{"seccomp", harness.RunSpec{CtrFlags: []string{"--seccomp"}}},
		{"cgroups", harness.RunSpec{Mounts: []specs.Mount{{Type: "cgroup", Source: "cgroup", Destination: "/sys/fs/cgroup", Options: []string{"ro", "nosuid", "noexec", "nodev"}}}}},
		{"privileged", harness.RunSpec{CtrFlags: []string{"--privileged"}}},
		{"memory limit", harness.RunSpec{MemoryLimit: 64 << 20}},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := fmt.Sprintf("example.com/same-%d:1", i)
			spec := c.spec
			spec.Port = built(t, shared, name, c.spec, "counter")
			spec.Image, spec.Annotations = name, asked
			k := start(t, shared, spec, "counter")
			k.Expect(t, "count", "102")
		})
	}
}

// An image whose CRIU images were made to let its process out: nothing of it is
// started.
func TestHostileImage(t *testing.T) {
	shared.Configured(t, harness.AnyCheckpoint)
	name := "example.com/hostile:1"
	port := built(t, shared, name, harness.RunSpec{}, "counter")
	var dir string
	for _, d := range checkpointDirs(t, shared) {
		if _, err := os.Stat(filepath.Join(d, "ids-1.img")); err == nil {
			dir = d
		}
	}
	path := filepath.Join(dir, "ids-1.img")
	good := read(t, path)
	ids := new(criucore.TaskKobjIdsEntry)
	const head = 12 // two words that say what it is, and a length
	if err := proto.Unmarshal(good[head:], ids); err != nil {
		t.Fatal(err)
	}
	was, err := proto.Marshal(ids)
	if err != nil || !bytes.Equal(was, good[head:]) {
		t.Fatalf("the image is not of the form expected (%v)", err)
	}
	*ids.PidNsId, *ids.MntNsId = 1, 6 // CRIU's own: the host's
	data, err := proto.Marshal(ids)
	if err != nil || len(data) != len(was) {
		t.Fatalf("%d bytes for %d (%v)", len(data), len(was), err)
	}
	write(t, path, append(bytes.Clone(good[:head]), data...))
	_, err = tryStart(t, harness.RunSpec{Image: name, Port: port, Annotations: asked}, "counter")
	harness.Says(t, err, "host's", "namespace", "process 1")
	write(t, path, good)
	k := start(t, shared, harness.RunSpec{Image: name, Port: port, Annotations: asked}, "counter")
	k.Expect(t, "count", "102")
}

// How likely a process is to be killed for want of memory is the new spec's.
func TestOOMScore(t *testing.T) {
	name := "example.com/oom:1"
	port := built(t, shared, name, harness.RunSpec{}, "counter")
	k, err := shared.Create(t.Context(), harness.RunSpec{
		ID: harness.Name(t), Image: name, Port: port, Annotations: asked, GPUs: []int{0}, Args: []string{"gpuwork", "counter"},
	})
	if err != nil {
		t.Fatal(err)
	}
	k.RemoveAtEnd(t)
	c, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := c.Spec(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	score := 321
	spec.Process.OOMScoreAdj = &score
	err = c.Update(t.Context(), func(_ context.Context, _ *client.Client, k *containers.Container) (err error) {
		k.Spec, err = typeurl.MarshalAnyToProto(spec)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Start(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "count", "102")
	pid, err := k.Pid(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := string(read(t, fmt.Sprintf("/proc/%d/oom_score_adj", pid))); got != "321\n" {
		t.Errorf("oom_score_adj is %q", got)
	}
}
