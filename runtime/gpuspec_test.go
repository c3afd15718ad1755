// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/cdi"
)

func TestReadToolkit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.toml")
	for _, test := range []struct {
		text string
		want cdi.Toolkit
		bad  bool
	}{
		{"", cdi.Toolkit{Variable: true}, false},
		{"disable-require = false\n[nvidia-container-cli]\nroot = \"/\"\n", cdi.Toolkit{Variable: true}, false},
		{"accept-nvidia-visible-devices-envvar-when-unprivileged = false\naccept-nvidia-visible-devices-as-volume-mounts = true\n", cdi.Toolkit{Mounts: true}, false},
		{"accept", cdi.Toolkit{}, true},
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
