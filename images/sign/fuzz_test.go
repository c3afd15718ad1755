// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package sign_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// No bytes but a key's own signature of these bytes count.
func FuzzSignature(f *testing.F) {
	manifest := []byte("what is signed")
	s := signer(f)
	name, signature, err := s.Signature(manifest)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(name, signature, manifest)
	f.Add(name, bytes.TrimSpace(signature), []byte("something else"))
	f.Add("gpuckpt.manifest.x.sig", []byte("MEUCIQ=="), manifest)
	f.Fuzz(func(t *testing.T, name string, data, signed []byte) {
		var files []images.File
		for _, file := range []struct {
			name string
			data []byte
		}{{sign.ManifestName, signed}, {name, data}} {
			files = append(files, images.File{Name: file.name, Path: file.name, Bytes: uint64(len(file.data)), Data: bytes.NewReader(file.data)})
		}
		found, err := sign.Read(files)
		if err != nil {
			return
		}
		if _, err := found.SignedBy([]sign.Key{s.Key}); err == nil && !bytes.Equal(signed, manifest) {
			t.Errorf("%q counts as the signature of %q", data, signed)
		}
	})
}

// A key that is read has a name of its own and one form.
func FuzzReadKeys(f *testing.F) {
	key := signer(f).Key
	f.Add(key.PEM())
	f.Add(append(key.PEM(), key.PEM()...))
	f.Add([]byte("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "keys.pub")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		keys, err := sign.ReadKeys(path)
		if err != nil {
			return
		}
		for _, k := range keys {
			if err := os.WriteFile(path, k.PEM(), 0o600); err != nil {
				t.Fatal(err)
			}
			again, err := sign.ReadKeys(path)
			if err != nil || len(again) != 1 || again[0].ID() != k.ID() {
				t.Errorf("the key %s is read again as %v, %v", k.ID(), again, err)
			}
		}
	})
}
