// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Packages with files for amd64 define all that they use on arm64 too, which only a release builds.
func TestArm64(t *testing.T) {
	dirs := make(map[string]bool)
	for _, tree := range []string{"internal", "runtime", "images"} {
		err := filepath.WalkDir(filepath.Join("../..", tree), func(file string, _ fs.DirEntry, err error) error {
			if strings.HasSuffix(file, "_amd64.go") {
				dirs[filepath.Dir(file)] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(dirs) < 2 {
		t.Errorf("only %d packages have files for amd64", len(dirs))
	}
	for dir := range dirs {
		for _, name := range undefined(t, dir, "arm64") {
			t.Errorf("%s: %s", dir, name)
		}
	}
}

// It finds a function that one architecture alone has.
func TestArm64Finds(t *testing.T) {
	if found := undefined(t, "testdata/arm64", "arm64"); len(found) != 1 {
		t.Errorf("found %q, want one", found)
	}
	if found := undefined(t, "testdata/arm64", "amd64"); len(found) != 0 {
		t.Errorf("found %q, want none", found)
	}
}

// undefined returns the names of a package's own that an architecture lacks. It looks into no other
// package: those would have to be compiled.
func undefined(t *testing.T, dir, arch string) (found []string) {
	t.Helper()
	where := build.Default
	where.GOARCH, where.CgoEnabled = arch, false
	pkg, err := where.ImportDir(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range pkg.GoFiles {
		file, err := parser.ParseFile(fset, filepath.Join(dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	own := regexp.MustCompile(`undefined: \w+$`)
	config := types.Config{Importer: empty{}, Error: func(err error) {
		if own.MatchString(err.Error()) {
			found = append(found, err.Error())
		}
	}}
	_, _ = config.Check(dir, fset, files, nil) // Error is told
	return found
}

// empty imports packages that have nothing.
type empty struct{}

func (empty) Import(name string) (*types.Package, error) {
	p := types.NewPackage(name, strings.TrimPrefix(path.Base(name), "go-"))
	p.MarkComplete()
	return p, nil
}
