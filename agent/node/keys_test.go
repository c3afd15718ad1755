// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
)

func publicKey(t *testing.T, key any) string {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}

// The keys of the cluster's nodes are files of the node, each node's one. What is no key that signs
// checkpoints is in none, since a file that cannot be read refuses every restore; what a node loses goes.
func TestTrust(t *testing.T) {
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p521, err := ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ed, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	first, second, other := publicKey(t, p256.Public()), publicKey(t, ed), publicKey(t, p521.Public())
	bad := []string{other, "no key", "", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", first + "more"}
	n := Node{Root: t.TempDir(), Keys: "/var/lib/gpuckpt/keys"}
	for _, step := range []struct {
		keys map[string][]string
		want map[string]string
	}{
		{map[string][]string{"a": {first}, "a.b": {first, second}, "bad": bad, "mixed": append(bad, second)}, map[string]string{"a.pub": first, "a.b.pub": first + second, "mixed.pub": second}},
		{map[string][]string{"a": {second}, "mixed": bad}, map[string]string{"a.pub": second}},
		{nil, nil},
	} {
		if err := n.Trust(step.keys); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(n.Root, n.Keys)
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != len(step.want) {
			t.Errorf("%v, %v; want %v", entries, err, step.want)
		}
		for name, want := range step.want {
			if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
				t.Errorf("%s is %s, %v; want %s", name, got, err, want)
			}
		}
	}
}
