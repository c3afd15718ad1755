// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"os"
	"path/filepath"
	"testing"
)

// A record is a container's of its own path, and of this schema, or it is none.
func FuzzRead(f *testing.F) {
	dir := f.TempDir()
	j := new(Journal)
	if err := j.Write(dir, Record{Namespace: "ns", Container: "c", Operation: "restore"}); err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(Path(dir, "ns", "c"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good, "ns")
	f.Add([]byte(`{"schema":1,"namespace":"..","container":"../c"}`), "..")
	f.Add([]byte(`{"schema":1,"processes":[null],"images":null,"shim":[]}`), "")
	f.Fuzz(func(t *testing.T, text []byte, namespace string) {
		top := t.TempDir()
		path := filepath.Join(top, "records", "ns", "c.json")
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := Read(path)
		if err != nil {
			return
		}
		if r.Schema != Schema || Path(filepath.Join(top, "records"), r.Namespace, r.Container) != path {
			t.Fatalf("taken for the record of %s in %s, schema %d", r.Container, r.Namespace, r.Schema)
		}
		if r.Namespace != "ns" || r.Container != "c" {
			t.Fatalf("the container is called %q in %q", r.Container, r.Namespace)
		}
		_ = r.Shim.Lives()
		_ = r.Init.Lives()
		if _, err := List(filepath.Join(top, "records"), namespace); err == nil && namespace != "*" && filepath.Base(namespace) != namespace {
			t.Fatalf("%q is taken for a namespace", namespace)
		}
	})
}
