// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package devnode

import (
	"os"
	"path/filepath"
	"testing"
)

// What is read of runc's state are rules that name a device.
func FuzzDeviceRules(f *testing.F) {
	f.Add([]byte(`{"config":{"cgroups":{"devices":[{"type":99,"major":195,"minor":-1,"permissions":"rwm","allow":true}]}}}`))
	f.Add([]byte(`{"config":{"cgroups":{"devices":[null,{"type":"c"}]}}}`))
	f.Add([]byte(`{"config":null}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(t.TempDir(), "state.json")
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		rules, err := runcDeviceRules(path)
		if (err == nil) != (len(rules) > 0) {
			t.Fatalf("%v, %v", rules, err)
		}
		for _, r := range rules {
			if r.Major == nil || r.Minor == nil || len(r.Type) != 1 {
				t.Fatalf("%+v", r)
			}
		}
	})
}
