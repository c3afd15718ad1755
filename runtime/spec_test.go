// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

// specIn writes a bundle with a config.json.
func specIn(t *testing.T, text string) (bundle string) {
	t.Helper()
	bundle = t.TempDir()
	writeFile(t, filepath.Join(bundle, "config.json"), text)
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

func TestPointAtSettings(t *testing.T) {
	for _, test := range []struct {
		name, text  string
		annotations map[string]string
		base, want  string
		err         string
	}{
		{
			name: "no annotations", text: `{"ociVersion":"1.2.0"}`,
			base: criuRuncConf, want: `{"annotations":{"org.criu.config":"/s"},"ociVersion":"1.2.0"}`,
		},
		{
			name: "null annotations", text: `{"annotations":null}`,
			base: criuRuncConf, want: `{"annotations":{"org.criu.config":"/s"}}`,
		},
		{
			name: "annotations stay", text: `{"annotations":{"a":"b"}}`, annotations: map[string]string{"a": "b"},
			base: criuRuncConf, want: `{"annotations":{"a":"b","org.criu.config":"/s"}}`,
		},
		{
			name: "a file of the container's own", text: `{"annotations":{"org.criu.config":"/mine"}}`,
			annotations: map[string]string{"org.criu.config": "/mine"},
			base:        "/mine", want: `{"annotations":{"org.criu.config":"/s"}}`,
		},
		{
			name: "none, by the container's own wish", text: `{"annotations":{"org.criu.config":""}}`,
			annotations: map[string]string{"org.criu.config": ""},
			base:        "", want: `{"annotations":{"org.criu.config":"/s"}}`,
		},
		{
			name: "what is not known stays", text: `{"future":{"b":[1e400,18446744073709551616,0.10],"a":"<&>\u003c\ud800"}, "z": null}`,
			base: criuRuncConf, want: `{"annotations":{"org.criu.config":"/s"},"future":{"b":[1e400,18446744073709551616,0.10],"a":"<&>\u003c\ud800"},"z":null}`,
		},
		{name: "empty", text: ``, err: "read the container's spec"},
		{name: "null", text: `null`, err: "it is empty"},
		{name: "a list", text: `[]`, err: "read the container's spec"},
		{name: "cut short", text: `{"a":`, err: "read the container's spec"},
		{name: "annotations of another kind", text: `{"annotations":{"a":1}}`, err: "read the annotations"},
	} {
		t.Run(test.name, func(t *testing.T) {
			bundle := specIn(t, test.text)
			annotations, base, err := pointAtSettings(bundle, "/s")
			wantError(t, err, test.err)
			if test.err != "" {
				test.want = test.text // as it was
			}
			if !maps.Equal(annotations, test.annotations) && err == nil || base != test.base {
				t.Errorf("annotations %v and base %q, want %v and %q", annotations, base, test.annotations, test.base)
			}
			if got := string(bytes.TrimSpace(readSpec(t, bundle))); got != test.want {
				t.Errorf("the spec is\n%s\nwant\n%s", got, test.want)
			}
			if entries, err := os.ReadDir(bundle); err != nil || len(entries) != 1 {
				t.Errorf("the bundle holds %v, error %v", entries, err)
			}
		})
	}
}

func TestPointAtSettingsWithoutSpec(t *testing.T) {
	_, _, err := pointAtSettings(t.TempDir(), "/s")
	wantError(t, err, "read the container's spec")
}

// A spec is edited in its annotations alone, or not at all.
func FuzzSpec(f *testing.F) {
	for _, seed := range []string{
		`{}`, `null`, `[]`, `{"annotations":{"a":"b"},"process":{"args":["x"]}}`, `{"annotations":null}`, `{"annotations":[]}`,
		`{"a":1e999,"b":"\u0000","a":2}`, `{"":{"":""}}`, "{\"a\":\"\xff\"}", ` { "a" : [ 1 , 2 ] } `,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		bundle := specIn(t, string(text))
		annotations, _, err := pointAtSettings(bundle, "/s")
		after := readSpec(t, bundle)
		if err != nil {
			if !bytes.Equal(after, text) {
				t.Errorf("after the error %v it is %q", err, after)
			}
			return
		}
		was, is := fields(t, text), fields(t, after)
		edited := make(map[string]string)
		if err := json.Unmarshal(is["annotations"], &edited); err != nil {
			t.Fatal(err)
		}
		if edited["org.criu.config"] != "/s" {
			t.Errorf("annotations %v", edited)
		}
		delete(edited, "org.criu.config")
		delete(annotations, "org.criu.config")
		if !maps.Equal(edited, annotations) {
			t.Errorf("annotations %v became %v", annotations, edited)
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
