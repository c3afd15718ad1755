// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Rooms prints how large each package of the product is and what it imports of this
// module, and fails if the house has lost its walls: a package with too many files or
// lines, a type with too many methods, an import that points up (docs/change-it.md).
// It counts Go files without tests, those of other architectures included. Integration,
// bench, hack and docs are not the product.
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
	maxFiles   = 20
	maxLines   = 2500
	maxMethods = 20
)

// room is a package.
type room struct {
	Dir, ImportPath   string
	GoFiles, CgoFiles []string
	IgnoredGoFiles    []string
	Imports           []string
	Module            struct{ Path string }

	name                  string // the import path within the module
	files, lines, methods int
	widest                string   // the type with the most methods
	ours                  []string // names of the rooms that it imports
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
	fmt.Fprintln(table, "package\tfiles\tlines\twidest type\timports")
	files, lines := 0, 0
	for _, r := range rooms {
		fmt.Fprintf(table, "%s\t%d\t%d\t%s %d\t%s\n", r.name, r.files, r.lines, r.widest, r.methods, strings.Join(r.ours, " "))
		files, lines = files+r.files, lines+r.lines
	}
	fmt.Fprintf(table, "total of %d packages\t%d\t%d\n", len(rooms), files, lines)
	return check(rooms), table.Flush()
}

// list finds the product's rooms in the module of the working directory.
func list() ([]room, error) {
	cmd := exec.Command("go", "list", "-json", "./...")
	cmd.Env = append(os.Environ(), "GOWORK=off")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var rooms []room
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var r room
		if err := decoder.Decode(&r); errors.Is(err, io.EOF) {
			return rooms, nil
		} else if err != nil {
			return nil, fmt.Errorf("read the output of go list: %w", err)
		}
		r.name = strings.TrimPrefix(r.ImportPath, r.Module.Path+"/")
		if top, _, _ := strings.Cut(r.name, "/"); top == "hack" || top == "docs" {
			continue
		}
		for _, path := range r.Imports {
			if name, ok := strings.CutPrefix(path, r.Module.Path+"/"); ok {
				r.ours = append(r.ours, name)
			}
		}
		if err := r.measure(); err != nil {
			return nil, err
		}
		rooms = append(rooms, r)
	}
}

// measure counts files, lines and methods.
func (r *room) measure() error {
	methods := make(map[string]map[string]bool) // of each type, by name: once for all architectures
	for _, name := range slices.Concat(r.GoFiles, r.CgoFiles, r.IgnoredGoFiles) {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		path := filepath.Join(r.Dir, name)
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		r.files++
		r.lines += bytes.Count(data, []byte("\n"))
		file, err := parser.ParseFile(token.NewFileSet(), path, data, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Recv == nil {
				continue
			}
			typ := receiver(f.Recv.List[0].Type)
			if methods[typ] == nil {
				methods[typ] = make(map[string]bool)
			}
			methods[typ][f.Name.Name] = true
		}
	}
	for typ, names := range methods {
		if len(names) > r.methods || len(names) == r.methods && typ < r.widest {
			r.widest, r.methods = typ, len(names)
		}
	}
	return nil
}

// receiver returns the name of a method's type.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return "?"
}

// check returns every wall that is down.
func check(rooms []room) (faults []string) {
	byName := make(map[string]room)
	for _, r := range rooms {
		byName[r.name] = r
	}
	for _, r := range rooms {
		if r.files > maxFiles {
			faults = append(faults, fmt.Sprintf("%s has %d files, at most %d; divide the package", r.name, r.files, maxFiles))
		}
		if r.lines > maxLines {
			faults = append(faults, fmt.Sprintf("%s has %d lines, at most %d; divide the package", r.name, r.lines, maxLines))
		}
		if r.methods > maxMethods {
			faults = append(faults, fmt.Sprintf("%s.%s has %d methods, at most %d; divide the type", r.name, r.widest, r.methods, maxMethods))
		}
		for _, to := range r.ours {
			if why := refused(r.name, to, byName); why != "" {
				faults = append(faults, fmt.Sprintf("%s imports %s: %s", r.name, to, why))
			}
		}
	}
	return faults
}

// libraries are the trees that others import by themselves: they know nothing above
// them, nor each other.
var libraries = []string{"cuda", "cdi", "images"}

// refused returns why a room must not import another one; nothing if it may.
// The floors: cmd, runtime, internal/*, the libraries, and internal/* that imports
// nothing above itself (a leaf).
func refused(from, to string, rooms map[string]room) string {
	fromTop, _, _ := strings.Cut(from, "/")
	toTop, _, _ := strings.Cut(to, "/")
	switch {
	case toTop == "cmd":
		return "nothing imports a program"
	case fromTop == "cmd":
		return ""
	case toTop == "runtime":
		return "the import points up: only programs import the runtime"
	case !slices.Contains(libraries, fromTop):
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

// isLeaf reports whether a room of internal/ imports nothing of this module but leaves.
func isLeaf(name string, rooms map[string]room) bool {
	return strings.HasPrefix(name, "internal/") &&
		!slices.ContainsFunc(rooms[name].ours, func(to string) bool { return !isLeaf(to, rooms) })
}
