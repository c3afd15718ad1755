// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// A node's CDI specification is read, or ignored, whatever a tool has written; what it grants is a
// device that it has.
func FuzzSpecification(f *testing.F) {
	f.Add([]byte(`{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0}]}}],
		"containerEdits":{"mounts":[{"hostPath":"/usr/lib/libcuda.so.580.1.2","containerPath":"/usr/lib/libcuda.so.580.1.2"}],"hooks":[{"hookName":"createContainer","path":"/bin/true"}]}}`), "0", "/usr/lib/libcuda.so.570.1.2")
	f.Add([]byte("cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices: [null]\ncontainerEdits:\n  mounts: [null]\n"), "all", "/")
	f.Fuzz(func(t *testing.T, text []byte, name, mounted string) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "nvidia.yaml"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := Open(dir)
		if err != nil {
			return
		}
		_ = r.Devices()
		files := r.Files()
		spec := &specs.Spec{Process: &specs.Process{Env: []string{visibleDevices + "=" + name}}, Linux: &specs.Linux{}}
		if added, err := r.Inject(spec, Toolkit{Variable: true, Runtime: true}); err == nil && added && len(r.Devices()) == 0 {
			t.Fatalf("%q was granted by a specification without devices", name)
		}
		if _, _, err := Rebind(spec, []string{mounted}, []string{mounted}, files); err != nil {
			return
		}
		for _, m := range spec.Mounts {
			if m.Destination == mounted && m.Source == "" {
				t.Fatalf("mounted from nowhere: %+v", m)
			}
		}
	})
}
