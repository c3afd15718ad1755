// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func tarFile(t *testing.T, dir, name string, entries ...string) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: e}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestParseRef(t *testing.T) {
	dir := t.TempDir()
	oci := tarFile(t, dir, "oci.tar", "blobs/sha256/x", "index.json", "oci-layout")
	kube := tarFile(t, dir, "kube.tar", "./config.dump", "checkpoint/x")
	layout := filepath.Join(dir, "layout")
	if err := os.Mkdir(layout, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(layout, "oci-layout"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for arg, want := range map[string]Ref{
		"example.com/job:1":            {Kind: InContainerd, Name: "example.com/job:1"},
		"containerd:example.com/job:1": {Kind: InContainerd, Name: "example.com/job:1"},
		"127.0.0.1:5000/job:1":         {Kind: InContainerd, Name: "127.0.0.1:5000/job:1"},
		"oci:new":                      {Kind: InLayout, Path: "new"},
		"oci:new@example.com/job:1":    {Kind: InLayout, Path: "new", Name: "example.com/job:1"},
		"oci-archive:a.tar@1":          {Kind: InOCIArchive, Path: "a.tar", Name: "1"},
		"kubernetes-archive:k.tar":     {Kind: InKubernetes, Path: "k.tar"},
		"dir:dump":                     {Kind: InDir, Path: "dump"},
		dir:                            {Kind: InDir, Path: dir},
		layout:                         {Kind: InLayout, Path: layout},
		oci:                            {Kind: InOCIArchive, Path: oci},
		oci + "@x":                     {Kind: InOCIArchive, Path: oci, Name: "x"},
		kube:                           {Kind: InKubernetes, Path: kube},
	} {
		if got, err := ParseRef(arg); err != nil || got != want {
			t.Errorf("%s: got %+v, %v, want %+v", arg, got, err, want)
		}
	}
	for arg, word := range map[string]string{
		"job":                         "not a full image name",
		"containerd:job":              "not a full image name",
		"./nothing":                   "no such file",
		"new.tar":                     "oci-archive:new.tar",
		tarFile(t, dir, "x.tar", "a"): "neither",
		dir + "@example.com/job:1":    "no images with names",
	} {
		if got, err := ParseRef(arg); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: got %+v, %v, want an error that says %q", arg, got, err, word)
		}
	}
}

// A file that says it is an archive and is none is refused by all that open it.
func TestOpenRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "job.tar")
	if err := os.WriteFile(path, []byte("no archive"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{InOCIArchive, InKubernetes, InLayout, InDir} {
		if s, err := Open(t.Context(), Ref{Kind: kind, Path: path}, nil); err == nil {
			s.Close()
			t.Errorf("%s: it was opened", kind)
		}
	}
}

// A checkpoint names its base by an image's name, and no file of this machine.
func TestBaseRef(t *testing.T) {
	for _, name := range []string{"oci-archive:/srv/private.tar", "/srv/private.tar", "kubernetes-archive:/srv/x.tar", "../x"} {
		if ref, err := ParseRef(baseRef("", name)); err == nil {
			t.Errorf("%s: taken for %+v", name, ref)
		}
	}
	for given, recorded := range map[string]string{"": "docker.io/library/app:1", "oci:/srv/layout@app:1": "docker.io/library/app:1"} {
		if ref, err := ParseRef(baseRef(given, recorded)); err != nil || (ref.Kind == InContainerd) != (given == "") {
			t.Errorf("%q, %q: %+v, %v", given, recorded, ref, err)
		}
	}
}
