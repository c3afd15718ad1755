// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// A dump of runc's, which has no gpuckpt.json, is signed where it lies, by one key and by
// another. A checkpoint whose digests prove nothing is not signed.
func TestSignDump(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "inventory.img"), []byte("inventory"), 0o600); err != nil {
		t.Fatal(err)
	}
	var keys []sign.Key
	for _, name := range []string{"a", "b"} {
		signer, err := sign.ReadOrMakeSigner(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		if err := SignDump(t.Context(), dir, signer.Signature); err != nil {
			t.Fatal(err)
		}
		keys = append(keys, signer.Key)
	}
	checkpoint, err := images.Open(dir) // with a gpuckpt.json
	if err != nil {
		t.Fatal(err)
	}
	s, err := sign.Read(checkpoint.Files)
	if err != nil {
		t.Fatal(err)
	}
	m, err := sign.Parse(s.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Check(t.Context(), checkpoint.Files); err != nil {
		t.Error(err)
	}
	for _, k := range keys {
		if _, err := s.SignedBy([]sign.Key{k}); err != nil {
			t.Error(err)
		}
	}
	// A file has changed: who signs then vouches for it, the others do not.
	if err := os.WriteFile(filepath.Join(dir, "inventory.img"), []byte("Inventory"), 0o600); err != nil {
		t.Fatal(err)
	}
	signer, err := sign.ReadOrMakeSigner(filepath.Join(t.TempDir(), "c"))
	if err == nil {
		err = SignDump(t.Context(), dir, signer.Signature)
	}
	if err != nil {
		t.Fatal(err)
	}
	if checkpoint, err = images.Open(dir); err != nil {
		t.Fatal(err)
	}
	if s, err = sign.Read(checkpoint.Files); err != nil {
		t.Fatal(err)
	}
	if _, err := s.SignedBy(keys); !errors.Is(err, sign.ErrUntrusted) {
		t.Errorf("the keys of before vouch for other files: %v", err)
	}
	if err := SignDump(t.Context(), "../testdata/schema-1", signer.Signature); !errors.Is(err, errOldDigests) {
		t.Errorf("schema version 1: %v", err)
	}
	if err := SignDump(t.Context(), t.TempDir(), signer.Signature); err == nil {
		t.Error("an empty directory was signed")
	}
}
