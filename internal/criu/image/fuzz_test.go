// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// A text that gets through does so as itself, and says no more than CRIU and runc look for.
func FuzzText(f *testing.F) {
	f.Add([]byte(`["pipe:[1]","/dev/null","x"]`))
	f.Add([]byte("3\t2\t/dev/nvidia0\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if once, err := readText(descriptors, bytes.NewReader(data)); err == nil {
			var names []string
			if err := json.Unmarshal(once, &names); err != nil || len(names) > 3 {
				t.Errorf("%q became %q, %v", data, once, err)
			}
			for _, name := range names {
				if name != "" && (!strings.HasPrefix(name, "pipe:[") || strings.ContainsAny(name, "/\x00\n")) {
					t.Errorf("%q has the stream %q", data, name)
				}
			}
			if twice, err := readText(descriptors, bytes.NewReader(once)); err != nil || !bytes.Equal(once, twice) {
				t.Errorf("%q is read again as %q, %v", once, twice, err)
			}
		}
		once, err := readText(devices, bytes.NewReader(data))
		if err != nil {
			return
		}
		for line := range strings.Lines(string(once)) {
			if words := strings.Split(line, "\t"); len(words) != 3 || !strings.HasPrefix(words[2], "/") {
				t.Errorf("%q is a device", line)
			}
		}
	})
}
