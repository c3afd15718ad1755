// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/cdi"
)

// Mistyped annotations of a container are found, and none of another project's. Each that package
// annotations has on a container is known.
func TestUnknownAnnotations(t *testing.T) {
	container := map[string]string{
		"dev.gpuckpt.on-checkpont": "stop", "dev.gpuckpt.hooks.timeout": "1s", "dev.gpuckpt.suspend": "true",
		"dev.gpuckpt-other": "x", "io.kubernetes.cri.container-name": "x", cdi.PairsAnnotation: "x",
	}
	file, err := parser.ParseFile(token.NewFileSet(), "../images/annotations/annotations.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, d := range file.Decls {
		group, ok := d.(*ast.GenDecl)
		if !ok || !strings.HasPrefix(group.Doc.Text(), "On a container:") {
			continue
		}
		for _, s := range group.Specs {
			key, err := strconv.Unquote(s.(*ast.ValueSpec).Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			container[key], n = "x", n+1
		}
	}
	want := []string{"dev.gpuckpt.hooks.timeout", "dev.gpuckpt.on-checkpont", "dev.gpuckpt.suspend"}
	if got := unknown(container); !slices.Equal(got, want) || n == 0 {
		t.Errorf("got %q, want %q; %d constants", got, want, n)
	}
}
