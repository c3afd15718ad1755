// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestResolveMounts(t *testing.T) {
	dir := t.TempDir()
	real := filepath.Join(dir, "libnvidia-x.so.580.65.06")
	other := filepath.Join(dir, "libnvidia-y.so.580.65.06")
	for _, name := range []string{real, other} {
		if err := os.WriteFile(name, []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, to := range map[string]string{"libnvidia-x.so": "libnvidia-x.so.1", "libnvidia-x.so.1": "libnvidia-x.so.580.65.06", "libnvidia-far.so": "../libnvidia-x.so", "libnvidia-loop.so": "libnvidia-loop.so"} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	bind := func(source, at string) specs.Mount {
		return specs.Mount{Destination: at, Source: source, Type: "bind", Options: []string{"rbind", "ro"}}
	}
	host := bind(dir, "/usr/local/nvidia")
	tmpfs := specs.Mount{Destination: "/usr/local/nvidia", Type: "tmpfs", Source: "tmpfs"}
	for name, test := range map[string]struct{ mounts, want []specs.Mount }{
		"three names of one": {
			[]specs.Mount{host, bind(real, "/usr/local/nvidia/libnvidia-x.so"), bind(real, "/usr/local/nvidia/libnvidia-x.so.1"), bind(real, "/usr/local/nvidia/libnvidia-x.so.580.65.06")},
			[]specs.Mount{host, bind(real, "/usr/local/nvidia/libnvidia-x.so.580.65.06")},
		},
		"one that is a link":   {[]specs.Mount{host, bind(real, "/usr/local/nvidia/libnvidia-x.so")}, []specs.Mount{host, bind(real, "/usr/local/nvidia/libnvidia-x.so.580.65.06")}},
		"no links there":       {[]specs.Mount{bind(real, "/lib/libnvidia-x.so"), bind(real, "/lib/libnvidia-x.so.1")}, nil},
		"covered":              {[]specs.Mount{host, tmpfs, bind(real, "/usr/local/nvidia/libnvidia-x.so")}, nil},
		"another directory":    {[]specs.Mount{host, bind(real, "/usr/local/nvidia/libnvidia-far.so")}, nil},
		"a loop":               {[]specs.Mount{host, bind(real, "/usr/local/nvidia/libnvidia-loop.so")}, nil},
		"not one of a driver":  {[]specs.Mount{host, bind(real, "/usr/local/nvidia/x")}, nil},
		"another file":         {[]specs.Mount{host, bind(real, "/usr/local/nvidia/libnvidia-x.so.580.65.06"), bind(other, "/usr/local/nvidia/libnvidia-x.so.580.65.06")}, nil},
		"mounted before links": {[]specs.Mount{bind(real, "/usr/local/nvidia/libnvidia-x.so"), host}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if test.want == nil {
				test.want = test.mounts
			}
			spec := &specs.Spec{Mounts: test.mounts}
			ResolveMounts(spec)
			if !reflect.DeepEqual(spec.Mounts, test.want) {
				t.Errorf("got %v\nwant %v", spec.Mounts, test.want)
			}
		})
	}
}
