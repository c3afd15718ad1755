// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// built makes a directory like that of hack/release/build, of small files.
func built(t *testing.T, age time.Duration) string {
	t.Helper()
	dir := t.TempDir()
	self, err := os.ReadFile("/proc/self/exe") // a Go program, whose modules have licences
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"amd64/bin/gpuckpt": self, "amd64/lib/gpuckpt/criu/PARTS": []byte("criu 4.2.1 pkg:github/checkpoint-restore/criu@v4.2.1\n"),
		"arm64/bin/gpuckpt": []byte("arm64"), "agent-amd64/agent/gpuckpt-agent": self, "agent-arm64/agent/gpuckpt-agent": []byte("arm64"), "demo-amd64/lib/gpuckpt/demo/demo": []byte("demo"), "kubectl/windows-amd64/kubectl-gpuckpt.exe": self, "sources/criu.tar": []byte("source"),
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o755); err != nil {
			t.Fatal(err)
		}
		when := time.Now().Add(-age)
		if err := os.Chtimes(path, when, when); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// The same input gives the same bytes, whenever and wherever; the parts and their licences are
// listed; without a key nothing is signed, and a signature is good.
func TestRelease(t *testing.T) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(t.TempDir(), "key.pem")
	if err := os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	var trees []tree
	for i, key := range []string{"", key} {
		r := release{version: "1.2.3", time: time.Unix(1700000000, 0).UTC(), arches: []string{"amd64", "arm64"}, source: "../..", built: built(t, time.Duration(i)*time.Hour), out: filepath.Join(t.TempDir(), "dist")}
		if err := r.make(key); err != nil {
			t.Fatal(err)
		}
		made, err := readTree(r.out)
		if err != nil {
			t.Fatal(err)
		}
		trees = append(trees, made)
	}
	if len(trees[0]) < 14 || len(trees[1]) != len(trees[0])+1 {
		t.Fatalf("%d files, and %d with a signature", len(trees[0]), len(trees[1]))
	}
	second := map[string][]byte{}
	for _, f := range trees[1] {
		second[f.name] = f.data
	}
	for _, f := range trees[0] {
		if !bytes.Equal(f.data, second[f.name]) {
			t.Errorf("%s is not the same twice", f.name)
		}
	}
	if !ed25519.Verify(public, second["SHA256SUMS"], second["SHA256SUMS.sig"]) {
		t.Error("the signature is bad")
	}
	for _, word := range []string{"pkg:golang/github.com/goreleaser/nfpm/v2@", "pkg:github/checkpoint-restore/criu@v4.2.1"} {
		if !strings.Contains(string(second["gpuckpt-1.2.3.cdx.json"]), word) {
			t.Errorf("the list of parts has no %s", word)
		}
	}
}

// A key of another kind is refused.
func TestKeyRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, []byte("no key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := sign(path, nil); err == nil || !strings.Contains(err.Error(), "not in PEM") {
		t.Error(err)
	}
}
