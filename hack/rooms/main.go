// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Rooms prints the product's packages: the lines of each, the names that it exports, and what it
// imports of this module. Rooms fails if the house has lost its walls (docs/internals/change-it.md): a package
// that lies outside of the only package that imports it, too many folders under internal/, an import
// that points up, or a package that exports too many names.
// Go files without tests count, those of other architectures included; what tests alone import is told
// apart. Integration, bench, hack and docs are not the product, but they count as importers.
//
//	go run ./hack/rooms [-report]
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
)

const (
	maxFolders = 8  // directly under internal/
	maxNames   = 70 // exported by a package: functions, types, variables and constants
)

// room is a package.
type room struct {
	Dir, ImportPath   string
	Name              string
	GoFiles, CgoFiles []string
	IgnoredGoFiles    []string
	Imports           []string
	TestImports       []string
	XTestImports      []string
	Module            struct{ Path string }

	name         string   // the import path within the module
	lines, names int      // names: those that it exports
	ours         []string // the rooms that it imports
	importers    []string // what imports it, of all modules
}

func main() {
	report := flag.Bool("report", false, "print only, never fail")
	flag.Parse()
	faults, err := run(os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "rooms:", err)
		os.Exit(2)
	}
	for _, fault := range faults {
		fmt.Fprintln(os.Stderr, "rooms:", fault)
	}
	if len(faults) > 0 && !*report {
		os.Exit(1)
	}
}

// run prints the table and returns what is wrong in it.
func run(w io.Writer) ([]string, error) {
	rooms, err := list()
	if err != nil {
		return nil, err
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "package\tlines\tnames\timported by\timports")
	lines, tests := 0, 0
	for _, r := range rooms {
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%s\n", r.name, r.lines, r.names, len(r.importers), strings.Join(r.ours, " "))
		lines += r.lines
		if r.Name != "main" && !slices.ContainsFunc(rooms, func(by room) bool { return slices.Contains(by.ours, r.name) }) {
			tests += r.lines
		}
	}
	fmt.Fprintf(table, "total of %d packages\t%d\n", len(rooms), lines)
	fmt.Fprintf(table, "of which tests alone import\t%d\n", tests)
	return check(rooms), table.Flush()
}

// list finds the product's rooms in the module of the working directory, and what imports them in
// the modules below it.
func list() ([]room, error) {
	all, err := goList(".")
	if err != nil {
		return nil, err
	}
	var rooms []room
	importers := make(map[string][]string)
	for _, r := range all {
		r.name = strings.TrimPrefix(r.ImportPath, r.Module.Path+"/")
		for _, path := range r.Imports {
			if name, ok := strings.CutPrefix(path, r.Module.Path+"/"); ok {
				r.ours = append(r.ours, name)
				importers[name] = append(importers[name], r.name)
			}
		}
		if top, _, _ := strings.Cut(r.name, "/"); top == "hack" || top == "docs" {
			continue
		}
		if err := r.measure(); err != nil {
			return nil, err
		}
		rooms = append(rooms, r)
	}
	for _, module := range modules {
		others, err := goList(module)
		if err != nil {
			return nil, err
		}
		for _, r := range others {
			for _, path := range slices.Concat(r.Imports, r.TestImports, r.XTestImports) {
				if name, ok := strings.CutPrefix(path, rooms[0].Module.Path+"/"); ok && !slices.Contains(importers[name], module) {
					importers[name] = append(importers[name], module)
				}
			}
		}
	}
	for i := range rooms {
		rooms[i].importers = importers[rooms[i].name]
	}
	return rooms, nil
}

// goList returns the packages of a module.
func goList(dir string) ([]room, error) {
	cmd := exec.Command("go", "list", "-json", "./...")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK=off")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list in %s: %w", dir, err)
	}
	var rooms []room
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var r room
		if err := decoder.Decode(&r); errors.Is(err, io.EOF) {
			return rooms, nil
		} else if err != nil {
			return nil, fmt.Errorf("read the output of go list: %w", err)
		}
		rooms = append(rooms, r)
	}
}

// measure counts lines and exported names, a name of several architectures once.
func (r *room) measure() error {
	names := make(map[string]bool)
	for _, name := range slices.Concat(r.GoFiles, r.CgoFiles, r.IgnoredGoFiles) {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		path := filepath.Join(r.Dir, name)
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		r.lines += bytes.Count(data, []byte("\n"))
		file, err := parser.ParseFile(token.NewFileSet(), path, data, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range file.Decls {
			for _, id := range declared(d) {
				if id.IsExported() {
					names[id.Name] = true
				}
			}
		}
	}
	r.names = len(names)
	return nil
}

// declared returns the names that a declaration gives to its package: methods are none.
func declared(d ast.Decl) (names []*ast.Ident) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Recv == nil {
			names = append(names, d.Name)
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				names = append(names, s.Name)
			case *ast.ValueSpec:
				names = append(names, s.Names...)
			}
		}
	}
	return names
}

// check returns every wall that is down.
func check(rooms []room) (faults []string) {
	byName := make(map[string]room)
	folders := make(map[string]bool)
	for _, r := range rooms {
		byName[r.name] = r
		if below, ok := strings.CutPrefix(r.name, "internal/"); ok {
			top, _, _ := strings.Cut(below, "/")
			folders[top] = true
		}
	}
	if len(folders) > maxFolders {
		faults = append(faults, fmt.Sprintf("internal/ has %d folders, at most %d; a package lies below its owner", len(folders), maxFolders))
	}
	for _, r := range rooms {
		if r.names > maxNames {
			faults = append(faults, fmt.Sprintf("%s exports %d names, at most %d; divide the package", r.name, r.names, maxNames))
		}
		if owner := r.owner(); owner != "" {
			faults = append(faults, fmt.Sprintf("%s is imported by %s alone; move it below %s/internal", r.name, owner, owner))
		}
		for _, to := range r.ours {
			if why := refused(r.name, to, byName); why != "" {
				faults = append(faults, fmt.Sprintf("%s imports %s: %s", r.name, to, why))
			}
		}
	}
	return faults
}

// owner returns the only importer of a room that does not lie inside of it, or nothing. Programs own
// nothing of internal/cli, which divides the command line into rooms, and other modules own nothing.
func (r room) owner() string {
	if len(r.importers) != 1 || !strings.Contains("/"+r.name, "/internal/") {
		return ""
	}
	owner := r.importers[0]
	if strings.HasPrefix(r.name, owner+"/") || strings.HasPrefix(r.name, "internal/cli/") && strings.HasPrefix(owner, "cmd/") ||
		slices.Contains(modules, owner) {
		return ""
	}
	return owner
}

// modules are those that import the product besides itself.
var modules = []string{"agent", "bench", "integration"}

// libraries are the trees that others import by themselves: they know nothing above
// them, nor each other.
var libraries = []string{"cuda", "cdi", "images"}

// floors are the storeys of the house, from the top: a room imports rooms of its own floor and of
// those below. The libraries lie below all, and import leaves alone.
var floors = [][]string{
	{"cmd"},
	{"runtime", "internal/cli"},
	{"internal/recovery"},
	{"internal/gpu", "internal/guard"},
	{"internal/criu", "internal/operation"},
	{"internal/node"},
	libraries,
}

// floor returns the storey of a room; -1 if it is on none.
func floor(name string) int {
	return slices.IndexFunc(floors, func(rooms []string) bool {
		return slices.ContainsFunc(rooms, func(room string) bool { return name == room || strings.HasPrefix(name, room+"/") })
	})
}

// refused returns why a room must not import another one; nothing if it may.
func refused(from, to string, rooms map[string]room) string {
	fromTop, _, _ := strings.Cut(from, "/")
	toTop, _, _ := strings.Cut(to, "/")
	switch {
	case floor(from) < 0:
		return "the room is on no floor: hack/rooms has the list"
	case toTop == "cmd" && !strings.HasPrefix(to, from+"/"):
		return "nothing imports a program"
	case !slices.Contains(libraries, fromTop):
		if floor(to) < floor(from) {
			return "the import points up"
		}
		return ""
	case toTop == fromTop:
		if fromTop == "images" && from == "images" && !strings.HasPrefix(to, "images/internal/") {
			return "the import points up: images/* imports images"
		}
		return ""
	case slices.Contains(libraries, toTop):
		return "cuda, cdi and images do not import each other"
	case !isLeaf(to, rooms):
		return "the import points up: a library imports only leaves, which import nothing above themselves"
	}
	return ""
}

// isLeaf reports whether a room of internal/node imports nothing of this module but leaves.
func isLeaf(name string, rooms map[string]room) bool {
	return strings.HasPrefix(name, "internal/node/") &&
		!slices.ContainsFunc(rooms[name].ours, func(to string) bool { return !isLeaf(to, rooms) })
}
