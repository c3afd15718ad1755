// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"encoding/json"
	"testing"
)

// A spec is given its container's name, and loses nothing; what is no spec is refused.
func FuzzNamed(f *testing.F) {
	f.Add([]byte(`{"ociVersion":"1.2.0","annotations":{"a":"b"}}`), "job")
	f.Add([]byte(`{"annotations":{"io.kubernetes.cri.container-name":"other"}}`), "job")
	f.Add([]byte("null"), "job")
	f.Fuzz(func(t *testing.T, spec []byte, name string) {
		data, err := named(spec, name)
		if err != nil {
			return
		}
		var before, after map[string]json.RawMessage
		if err := json.Unmarshal(data, &after); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(spec, &before); err != nil {
			t.Fatal(err)
		}
		for key := range before {
			if after[key] == nil {
				t.Fatalf("%q is gone", key)
			}
		}
		if len(after["annotations"]) == 0 {
			t.Fatal("it has no name")
		}
	})
}
