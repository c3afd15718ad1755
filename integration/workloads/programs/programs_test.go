// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package programs

import (
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
)

// Each program has its source, and the dry run tries it.
func TestList(t *testing.T) {
	dry, err := os.ReadFile("../dry-run")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, p := range List {
		if names[p.Name] {
			t.Errorf("two programs are named %s", p.Name)
		}
		names[p.Name] = true
		if _, err := fs.Stat(Sources, p.File); err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
		if want := fmt.Sprintf("%q: ([%q", p.Name, p.File); !strings.Contains(string(dry), want) {
			t.Errorf("the dry run has no %s", want)
		}
		if p.GPU == 0 || p.Host == 0 || p.Limit == 0 {
			t.Errorf("%s: it needs no memory or no time", p.Name)
		}
		if (p.Refused == nil) != (p.WayRound == "") {
			t.Errorf("%s: a refusal, and only one, has a way round", p.Name)
		}
	}
}
