// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// specIn writes a bundle with a config.json.
func specIn(t *testing.T, text string) (bundle string) {
	t.Helper()
	bundle = t.TempDir()
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return bundle
}

func readSpec(t *testing.T, bundle string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// annotate sets an annotation, as Create does in every spec.
func annotate(spec *specs.Spec) {
	if spec.Annotations == nil {
		spec.Annotations = make(map[string]string)
	}
	spec.Annotations["k"] = "/s"
}

func TestFile(t *testing.T) {
	const long = `{"ociVersion": "1.0.2", "future": {"kept": [1, 2.50]}, "process": {"args": ["<a>"], "alsoFuture": true}, "mounts": [{"destination": "/a"}]}`
	for _, test := range []struct {
		name, text string
		edit       func(*specs.Spec)
		want       string
		err        string
	}{
		{name: "no annotations", text: `{"ociVersion":"1.2.0"}`, edit: annotate, want: `{"annotations":{"k":"/s"},"ociVersion":"1.2.0"}`},
		{name: "null annotations", text: `{"annotations":null}`, edit: annotate, want: `{"annotations":{"k":"/s"}}`},
		{name: "annotations stay", text: `{"annotations":{"a":"b"}}`, edit: annotate, want: `{"annotations":{"a":"b","k":"/s"}}`},
		{name: "an annotation is replaced", text: `{"annotations":{"k":"/mine"}}`, edit: annotate, want: `{"annotations":{"k":"/s"}}`},
		{
			name: "what is not known stays", text: `{"future":{"b":[1e400,18446744073709551616,0.10],"a":"<&>\u003c\ud800"}, "z": null}`, edit: annotate,
			want: `{"annotations":{"k":"/s"},"future":{"b":[1e400,18446744073709551616,0.10],"a":"<&>\u003c\ud800"},"z":null}`,
		},
		{name: "no edit", text: long, edit: func(*specs.Spec) {}, want: long},
		{
			name: "one part", text: long, edit: func(s *specs.Spec) { s.Mounts = append(s.Mounts, specs.Mount{Destination: "/b"}) },
			want: `{"future":{"kept":[1,2.50]},"mounts":[{"destination":"/a"},{"destination":"/b"}],"ociVersion":"1.0.2","process":{"args":["<a>"],"alsoFuture":true}}`,
		},
		{
			name: "a part less", text: long, edit: func(s *specs.Spec) { s.Mounts = nil },
			want: `{"future":{"kept":[1,2.50]},"ociVersion":"1.0.2","process":{"args":["<a>"],"alsoFuture":true}}`,
		},
		{name: "empty", text: ``, err: "read the container's spec"},
		{name: "null", text: `null`, err: "it is empty"},
		{name: "a list", text: `[]`, err: "read the container's spec"},
		{name: "cut short", text: `{"a":`, err: "read the container's spec"},
		{name: "annotations of another kind", text: `{"annotations":{"a":1}}`, err: "annotations"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := specIn(t, test.text)
			file, err := Read(dir)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("error %v, want %q", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			test.edit(file.Spec)
			for range 2 { // the second time nothing is left to write
				if err := file.Save(); err != nil {
					t.Fatal(err)
				}
				if got := string(bytes.TrimSpace(readSpec(t, dir))); got != test.want {
					t.Errorf("the spec is\n%s\nwant\n%s", got, test.want)
				}
			}
			if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
				t.Errorf("the bundle holds %v, error %v", entries, err)
			}
		})
	}
}

func TestReadNothing(t *testing.T) {
	if _, err := Read(t.TempDir()); err == nil || !strings.Contains(err.Error(), "read the container's spec") {
		t.Errorf("error %v", err)
	}
}

// A spec whose annotations are edited changes in these alone.
func FuzzFile(f *testing.F) {
	for _, seed := range []string{
		`{}`, `null`, `[]`, `{"annotations":{"a":"b"},"process":{"args":["x"]}}`, `{"annotations":null}`, `{"annotations":[]}`,
		`{"a":1e999,"b":"\u0000","a":2}`, `{"":{"":""}}`, "{\"a\":\"\xff\"}", ` { "a" : [ 1 , 2 ] } `,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := specIn(t, string(text))
		file, err := Read(dir)
		if err != nil {
			return
		}
		annotate(file.Spec)
		if err := file.Save(); err != nil {
			if after := readSpec(t, dir); !bytes.Equal(after, text) {
				t.Errorf("after the error %v it is %q", err, after)
			}
			return
		}
		was, is := fields(t, text), fields(t, readSpec(t, dir))
		edited := make(map[string]string)
		if err := json.Unmarshal(is["annotations"], &edited); err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(edited, file.Spec.Annotations) {
			t.Errorf("annotations %v became %v", file.Spec.Annotations, edited)
		}
		delete(was, "annotations")
		delete(is, "annotations")
		if !maps.EqualFunc(was, is, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
			t.Errorf("%q became %q", was, is)
		}
	})
}

// fields are those of a JSON object, without white space.
func fields(t *testing.T, text []byte) map[string]json.RawMessage {
	t.Helper()
	var all map[string]json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	for name, value := range all {
		var b bytes.Buffer
		if err := json.Compact(&b, value); err != nil {
			t.Fatal(err)
		}
		all[name] = b.Bytes()
	}
	return all
}
