// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"maps"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/criu"
)

// CRIU reads this shim's settings, which begin with the file that it would have read
// without.
func TestPointAtSettings(t *testing.T) {
	for _, test := range []struct {
		given map[string]string
		base  string
	}{
		{nil, criu.RuncSettings},
		{map[string]string{"a": "b"}, criu.RuncSettings},
		{map[string]string{"org.criu.config": "/mine"}, "/mine"},
		{map[string]string{"org.criu.config": ""}, ""},
	} {
		c, spec := &container{bundle: "/b"}, &specs.Spec{Annotations: maps.Clone(test.given)}
		c.pointAtSettings(spec)
		if c.criuBase != test.base || !maps.Equal(c.annotations, test.given) || spec.Annotations["org.criu.config"] != "/b/"+criu.SettingsName || spec.Annotations["a"] != test.given["a"] {
			t.Errorf("%v: base %q, the container's %v, in the spec %v", test.given, c.criuBase, c.annotations, spec.Annotations)
		}
	}
}
