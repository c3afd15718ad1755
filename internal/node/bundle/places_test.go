// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// TestAtPlaces compares with what runc does; integration/checkpoint, TestMountsThroughLinks, has runc
// mount the like.
func TestAtPlaces(t *testing.T) {
	root, volume := t.TempDir(), t.TempDir()
	for dir, links := range map[string]map[string]string{
		root: {
			"var/run": "/run", "var/lock": "../run/lock", "lib": "usr/lib", "var/twice": "run/again", "run/again": "there", "out": "../../../../../etc",
			"loop": "loop", "data/hidden": "/srv", "dev/shm": "/run/shm", "file": "usr/lib/file", "gone": "/not/there",
		},
		volume: {"link": "real", "up": "../run", "abs": "/var/run/v", "host": root},
	} {
		for name, to := range links {
			if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	bind := func(at string) specs.Mount { return specs.Mount{Destination: at, Type: "bind", Source: "/source"} }
	for _, test := range []struct {
		name    string
		mounts  []specs.Mount
		at      string // of the last mount
		outside bool   // runc tells CRIU another place
	}{
		{name: "none", mounts: []specs.Mount{bind("/etc/hosts")}, at: "/etc/hosts"},
		{name: "absolute", mounts: []specs.Mount{bind("/var/run/secrets/x")}, at: "/run/secrets/x"},
		{name: "relative", mounts: []specs.Mount{bind("/var/lock/x")}, at: "/run/lock/x"},
		{name: "the last part", mounts: []specs.Mount{bind("/lib")}, at: "/usr/lib"},
		{name: "a file", mounts: []specs.Mount{bind("/file")}, at: "/usr/lib/file"},
		{name: "to another", mounts: []specs.Mount{bind("/var/twice/x")}, at: "/run/there/x"},
		{name: "to itself", mounts: []specs.Mount{bind("/loop/x")}, at: "/loop/x"},
		{name: "to nothing", mounts: []specs.Mount{bind("/gone/x")}, at: "/not/there/x"},
		{name: "out of the root", mounts: []specs.Mount{bind("/out/x")}, at: "/etc/x"},
		{name: "slashes and dots", mounts: []specs.Mount{bind("//var/./run//x/")}, at: "/run/x"},
		{name: "not absolute", mounts: []specs.Mount{bind("var/run/x")}, at: "/run/x"},
		{name: "dots behind a link", mounts: []specs.Mount{bind("/var/run/../x")}, at: "/var/x", outside: true},
		{name: "tmpfs", mounts: []specs.Mount{{Destination: "/var/run", Type: "tmpfs"}}, at: "/run"},
		{name: "below a tmpfs at a link", mounts: []specs.Mount{{Destination: "/var/run", Type: "tmpfs"}, bind("/var/run/again/x")}, at: "/run/again/x", outside: true},
		{name: "below a tmpfs with a copy", mounts: []specs.Mount{{Destination: "/run", Type: "tmpfs", Options: []string{"tmpcopyup"}}, bind("/run/again/x")}, at: "/run/there/x"},
		{name: "in a volume", mounts: []specs.Mount{{Destination: "/data", Type: "bind", Source: volume}, bind("/data/link/x")}, at: "/data/real/x", outside: true},
		{name: "in a volume, up", mounts: []specs.Mount{{Destination: "/data", Options: []string{"rbind"}, Source: volume}, bind("/data/up/x")}, at: "/run/x", outside: true},
		{name: "in a volume, absolute", mounts: []specs.Mount{{Destination: "/data", Type: "bind", Source: volume}, bind("/data/abs")}, at: "/run/v", outside: true},
		{name: "in a volume, to the host", mounts: []specs.Mount{{Destination: "/data", Type: "bind", Source: volume}, bind("/data/host/x")}, at: root + "/x", outside: true},
		{name: "below a volume", mounts: []specs.Mount{{Destination: "/data", Type: "bind", Source: volume}, bind("/data/hidden/x")}, at: "/data/hidden/x", outside: true},
		{name: "in a later volume", mounts: []specs.Mount{{Destination: "/data", Type: "bind", Source: "/not/there"}, {Destination: "/data", Type: "bind", Source: volume}, bind("/data/link")}, at: "/data/real", outside: true},
		{name: "in a volume at a link", mounts: []specs.Mount{{Destination: "/var/run", Type: "bind", Source: volume}, bind("/run/link")}, at: "/run/real", outside: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			at, outside := bundle.AtPlaces(&specs.Spec{Mounts: test.mounts}, root)
			last := len(test.mounts) - 1
			if got := at.Mounts[last].Destination; got != test.at {
				t.Errorf("%s is at %s, not %s", test.mounts[last].Destination, got, test.at)
			}
			if got := slices.Contains(outside, bundle.Outside{Place: test.at, Key: test.at, Source: "/source"}); got != test.outside {
				t.Errorf("CRIU is told of it: %v, not %v", got, test.outside)
			}
		})
	}
	spec := &specs.Spec{
		Mounts: []specs.Mount{{Destination: "/proc", Type: "proc"}, {Destination: "/data", Type: "bind", Source: volume}},
		Linux: &specs.Linux{
			MaskedPaths: []string{"/proc/kcore", "/var/run/masked"}, ReadonlyPaths: []string{"/lib/x", "/data/link"},
			Devices: []specs.LinuxDevice{{Path: "/var/run/gpu0"}, {Path: "/var/run"}, {}},
		},
	}
	if err := os.WriteFile(filepath.Join(root, "run/masked"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	at, outside := bundle.AtPlaces(spec, root)
	if d := at.Linux.Devices; d[0].Path != "/run/gpu0" || d[1].Path != "/var/run" || d[2].Path != "" {
		t.Errorf("devices: %v", d)
	}
	if !slices.Equal(at.Linux.MaskedPaths, []string{"/proc/kcore", "/run/masked"}) || !slices.Equal(at.Linux.ReadonlyPaths, []string{"/usr/lib/x", "/data/real"}) {
		t.Errorf("masked %v, read-only %v", at.Linux.MaskedPaths, at.Linux.ReadonlyPaths)
	}
	if !slices.Contains(outside, bundle.Outside{Place: "/run/masked", Key: "/dev/null", Source: "/dev/null"}) || spec.Linux.MaskedPaths[1] != "/var/run/masked" {
		t.Errorf("outside: %v; the spec: %v", outside, spec.Linux.MaskedPaths)
	}
}
