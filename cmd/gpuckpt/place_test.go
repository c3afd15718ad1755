// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
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

func TestParsePlace(t *testing.T) {
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
	for arg, want := range map[string]place{
		"example.com/job:1":            {kind: inContainerd, ref: "example.com/job:1"},
		"containerd:example.com/job:1": {kind: inContainerd, ref: "example.com/job:1"},
		"127.0.0.1:5000/job:1":         {kind: inContainerd, ref: "127.0.0.1:5000/job:1"},
		"oci:new":                      {kind: inLayout, path: "new"},
		"oci:new@example.com/job:1":    {kind: inLayout, path: "new", ref: "example.com/job:1"},
		"oci-archive:a.tar@1":          {kind: inOCIArchive, path: "a.tar", ref: "1"},
		"kubernetes-archive:k.tar":     {kind: inKubernetes, path: "k.tar"},
		"dir:dump":                     {kind: inDir, path: "dump"},
		dir:                            {kind: inDir, path: dir},
		layout:                         {kind: inLayout, path: layout},
		oci:                            {kind: inOCIArchive, path: oci},
		oci + "@x":                     {kind: inOCIArchive, path: oci, ref: "x"},
		kube:                           {kind: inKubernetes, path: kube},
	} {
		if got, err := parsePlace(arg); err != nil || got != want {
			t.Errorf("%s: got %+v, %v, want %+v", arg, got, err, want)
		}
	}
	for arg, word := range map[string]string{
		"job":                         "no full name",
		"containerd:job":              "no full name",
		"./nothing":                   "no such file",
		tarFile(t, dir, "x.tar", "a"): "neither",
		dir + "@example.com/job:1":    "no images with names",
	} {
		if got, err := parsePlace(arg); err == nil || !strings.Contains(err.Error(), word) {
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
	for _, kind := range []string{inOCIArchive, inKubernetes, inLayout, inDir} {
		if s, err := (place{kind: kind, path: path}).open(context.Background(), nil, nil); err == nil {
			s.Close()
			t.Errorf("%s: it was opened", kind)
		}
	}
}

func TestParseMount(t *testing.T) {
	got, err := parseMount("type=bind,src=/a,dst=/b,options=rbind:ro")
	if want := (specs.Mount{Type: "bind", Source: "/a", Destination: "/b", Options: []string{"rbind", "ro"}}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, bad := range []string{"", "type=bind", "dst=/b,owner=me"} {
		if _, err := parseMount(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]uint64{"64MiB": 64 << 20, "1GiB": 1 << 30, "4096": 4096, "1KiB": 1024} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("%s: got %d, %v", text, got, err)
		}
	}
	for _, bad := range []string{"", "1TB", "-1", "99999999999999999999GiB", "18446744073709551615KiB"} {
		if got, err := parseSize(bad); err == nil {
			t.Errorf("%q was read as %d", bad, got)
		}
	}
	for bytes, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 64 << 20: "64.0 MiB", 5 << 40: "5.0 TiB", 1 << 62: "4194304.0 TiB"} {
		if got := size(bytes); got != want {
			t.Errorf("%d: got %q, want %q", bytes, got, want)
		}
	}
}

func TestOnce(t *testing.T) {
	if got := once("push it: not found\nnot found\nleft behind\nnot found"); got != "push it: not found\nleft behind" {
		t.Errorf("got %q", got)
	}
}

func TestNewName(t *testing.T) {
	for ref, want := range map[string]string{"example.com:5000/team/job:1": "job-", "example.com/job@sha256:abc": "job-"} {
		if got := newName(ref); !strings.HasPrefix(got, want) || len(got) != len(want)+8 {
			t.Errorf("%s: got %q", ref, got)
		}
	}
}
