// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package features

import (
	"os"
	"strings"
	"testing"
)

// docs/kubernetes.md has the table as it is.
func TestTable(t *testing.T) {
	page, err := os.ReadFile("../../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), "\n\n"+Table()+"\n") {
		t.Errorf("docs/kubernetes.md does not have this table:\n%s", Table())
	}
}
