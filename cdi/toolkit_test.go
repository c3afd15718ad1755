// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"path/filepath"
	"testing"
)

func TestReadToolkit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.toml")
	for _, test := range []struct {
		text string
		want Toolkit
		bad  bool
	}{
		{"", Toolkit{Variable: true}, false},
		{"disable-require = false\n[nvidia-container-cli]\nroot = \"/\"\n", Toolkit{Variable: true}, false},
		{"accept-nvidia-visible-devices-envvar-when-unprivileged = false\naccept-nvidia-visible-devices-as-volume-mounts = true\n", Toolkit{Mounts: true}, false},
		{"accept", Toolkit{}, true},
	} {
		if test.text != "" {
			if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := readToolkit(path); got != test.want || (err != nil) != test.bad {
			t.Errorf("%q: %+v, error %v; want %+v", test.text, got, err, test.want)
		}
	}
}
