// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The image has a distribution's links, such as /var/run, and a volume has others. runc follows them
// to where it mounts what the spec has.
func TestMountsThroughLinks(t *testing.T) {
	results.Add(t)
	volume, secret, file := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"link": "real", "twice": "link/below", "up": "../srv", "absolute": "/var/run/absolute"} {
		if err := os.Symlink(to, filepath.Join(volume, name)); err != nil {
			t.Fatal(err)
		}
	}
	bind := func(source, at string) specs.Mount {
		return specs.Mount{Type: "bind", Source: source, Destination: at, Options: []string{"rbind", "ro"}}
	}
	mounts, places := []specs.Mount{bind(volume, "/var/lib/data")}, map[string]bool{"/var/lib/data": true}
	for at, place := range map[string]string{
		"/var/run/secrets/kubernetes.io/serviceaccount": "/run/secrets/kubernetes.io/serviceaccount",
		"/var/lock/app":                  "/run/lock/app",
		"//usr/./lib64/../../lib//dots/": "/usr/lib/dots",
		"/var/run/../behind":             "/var/behind",
		"/var/lib/data/link/x":           "/var/lib/data/real/x",
		"/var/lib/data/twice/x":          "/var/lib/data/real/below/x",
		"/var/lib/data/up/x":             "/var/lib/srv/x",
		"/var/lib/data/absolute":         "/run/absolute",
	} {
		mounts, places[place] = append(mounts, bind(secret, at)), true
	}
	mounts = append(mounts, bind(file, "/lib/file"), specs.Mount{Type: "tmpfs", Source: "tmpfs", Destination: "/var/run/scratch", Options: []string{"nosuid"}})
	places["/usr/lib/file"], places["/run/scratch"], places["/var/lib/data/real/hidden"] = true, true, true
	mounts[0].Options[1] = "rw" // for the places of mounts
	if err := os.Mkdir(filepath.Join(volume, "real"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(volume, "real", "hidden"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	others := func(_ context.Context, _ oci.Client, _ *containers.Container, s *specs.Spec) error {
		s.Linux.MaskedPaths = append(s.Linux.MaskedPaths, "/var/lib/data/link/hidden", "/var/lock/none")
		s.Linux.Devices = append(s.Linux.Devices, specs.LinuxDevice{Path: "/var/run/random", Type: "c", Major: 1, Minor: 9})
		return nil
	}
	for name, gpus := range map[string][]int{"plain": nil, "gpu": {0}} {
		t.Run(name, func(t *testing.T) {
			spec := harness.RunSpec{GPUs: gpus, Mounts: mounts, Amend: []oci.SpecOpts{others}, CtrFlags: []string{"--cap-drop", "CAP_SYS_ADMIN", "--cwd", "/var/run/scratch"}}
			program := "counter"
			if gpus == nil {
				program = "plain"
			}
			k := shared.Work(t, spec, program)
			k.Expect(t, "count", "101")
			ref := takeCheckpoint(t, shared, k, "1")
			k.Expect(t, "count", "102")
			k.MustRemove(t)
			r := restore(t, shared, k.ID, ref, k.Port)
			r.Expect(t, "count", "102")
			mountedAt(t, r, slices.Collect(maps.Keys(places)))
			if cwd, err := os.Readlink("/proc/" + strconv.Itoa(r.MustPid(t)) + "/cwd"); err != nil || cwd != "/run/scratch" {
				t.Errorf("it works in %s, %v", cwd, err)
			}
			again := takeCheckpoint(t, shared, r, "2") // of a restored one
			r.MustRemove(t)
			restore(t, shared, k.ID, again, k.Port).Expect(t, "count", "103")
		})
	}
}

// mountedAt fails the test where a container has nothing mounted at a place.
func mountedAt(t *testing.T, k *harness.Container, places []string) {
	t.Helper()
	file, err := os.Open("/proc/" + strconv.Itoa(k.MustPid(t)) + "/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	have, err := mountinfo.GetMountsFromReader(file, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, place := range places {
		if !slices.ContainsFunc(have, func(m *mountinfo.Info) bool { return m.Mountpoint == place }) {
			t.Errorf("nothing is mounted at %s", place)
		}
	}
}

// A program may change what leads to its mounts. It is not checkpointed then, for its restore would
// mount something else there, or at another place; and it goes on.
func TestLinkChanged(t *testing.T) {
	results.Add(t)
	secret := specs.Mount{Type: "bind", Source: t.TempDir(), Destination: "/var/run/secrets", Options: []string{"rbind", "ro"}}
	other := specs.Mount{Type: "bind", Source: t.TempDir(), Destination: "/srv/secrets", Options: []string{"rbind", "rw"}}
	for name, gpus := range map[string][]int{"plain": nil, "gpu": {0}} {
		for _, to := range []string{"/srv", "/tmp"} {
			t.Run(name+filepath.Base(to), func(t *testing.T) {
				program := "counter"
				if gpus == nil {
					program = "plain"
				}
				k := shared.Work(t, harness.RunSpec{GPUs: gpus, Mounts: []specs.Mount{secret, other}, CtrFlags: []string{"--cap-drop", "CAP_SYS_ADMIN"}}, program)
				k.Expect(t, "count", "101")
				link := "/proc/" + strconv.Itoa(k.MustPid(t)) + "/root/var/run"
				if err := os.Remove(link); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink(to, link); err != nil {
					t.Fatal(err)
				}
				err := k.Checkpoint(t.Context(), "changed.test/"+harness.Name(t)+":1")
				harness.Says(t, err, "a symbolic link that leads to one of the spec's mounts was changed", "/run/secrets")
				k.Expect(t, "count", "102")
				if err := errors.Join(os.Remove(link), os.Symlink("../run", link)); err != nil {
					t.Fatal(err)
				}
				ref := takeCheckpoint(t, shared, k, "1")
				k.MustRemove(t)
				r := restore(t, shared, k.ID, ref, k.Port)
				r.Expect(t, "count", "103")
				mountedAt(t, r, []string{"/run/secrets", "/srv/secrets"})
			})
		}
	}
}
