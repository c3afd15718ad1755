// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

func view(value string) config.View {
	v := config.View{Node: config.Default()}
	if value != "" {
		v.Annotations = map[string]string{annotations.Interposer: value}
	}
	return v
}

// installed puts an interposer beside the test's own program.
func installed(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(filepath.Dir(self), LibraryName)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(path) })
	return path
}

func TestPut(t *testing.T) {
	library := installed(t)
	mount := specs.Mount{Destination: InContainer, Source: library, Type: "bind", Options: []string{"bind", "ro", "nosuid", "nodev"}}
	for _, test := range []struct {
		name      string
		env, want []string
	}{
		{"none", []string{"A=b"}, []string{"A=b", "LD_PRELOAD=" + InContainer}},
		{"empty", []string{"LD_PRELOAD=", "A=b"}, []string{"LD_PRELOAD=" + InContainer, "A=b"}},
		{"another", []string{"LD_PRELOAD=/lib/x.so:/lib/y.so"}, []string{"LD_PRELOAD=/lib/x.so:/lib/y.so:" + InContainer}},
		{"the last one counts", []string{"LD_PRELOAD=/x", "LD_PRELOAD=/y"}, []string{"LD_PRELOAD=/x", "LD_PRELOAD=/y:" + InContainer}},
		{"there already", []string{"LD_PRELOAD=" + InContainer}, []string{"LD_PRELOAD=" + InContainer}},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec := &specs.Spec{Process: &specs.Process{Env: slices.Clone(test.env)}}
			for range 2 { // a spec that has been here is left as it is
				if err := Put(spec, view("true")); err != nil {
					t.Fatal(err)
				}
			}
			if !slices.Equal(spec.Process.Env, test.want) || !reflect.DeepEqual(spec.Mounts, []specs.Mount{mount}) {
				t.Errorf("environment %q, mounts %v", spec.Process.Env, spec.Mounts)
			}
		})
	}
}

// Nothing is changed without the annotation, with another value, or where there is no interposer.
func TestPutNothing(t *testing.T) {
	for value, want := range map[string]error{"": nil, "false": nil, "yes": errdefs.ErrInvalidArgument} {
		spec := &specs.Spec{Process: &specs.Process{Env: []string{"A=b"}}}
		if err := Put(spec, view(value)); !errors.Is(err, want) {
			t.Errorf("%q: %v", value, err)
		}
		if len(spec.Mounts) > 0 || len(spec.Process.Env) != 1 {
			t.Errorf("%q: %v, %v", value, spec.Mounts, spec.Process.Env)
		}
	}
	if err := Put(&specs.Spec{Process: &specs.Process{}}, view("true")); err == nil {
		t.Error("an interposer was found where there is none")
	}
}
