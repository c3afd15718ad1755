// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package crypt

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

const secret = "what the program had in its memory"

func put(t testing.TB, store content.Ingester, mediaType string, data []byte) ocispec.Descriptor {
	t.Helper()
	d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
	if err := content.WriteBlob(t.Context(), store, d.Digest.String(), bytes.NewReader(data), d); err != nil {
		t.Fatal(err)
	}
	return d
}

func asJSON(t testing.TB, value any) []byte {
	t.Helper()
	data, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func newLayout(t testing.TB) *layout.Dir {
	t.Helper()
	l, err := layout.Open(filepath.Join(t.TempDir(), "layout"))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// checkpointImage builds an image of a base layer and a layer with the secret, not compressed.
func checkpointImage(t testing.TB, store content.Store) ocispec.Descriptor {
	t.Helper()
	layer := put(t, store, ocispec.MediaTypeImageLayer, []byte("the base's layer"))
	config := put(t, store, ocispec.MediaTypeImageConfig, asJSON(t, ocispec.Image{RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{layer.Digest}}}))
	base := put(t, store, ocispec.MediaTypeImageManifest, asJSON(t, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Config: config, Layers: []ocispec.Descriptor{layer},
	}))
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "inventory.img"), []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := images.Open(dir, images.AllowWithoutGPU)
	if err != nil {
		t.Fatal(err)
	}
	r, err := oci.Build(t.Context(), store, oci.Options{Checkpoint: c, Base: base, Compression: oci.None, Annotations: map[string]string{"theirs": "kept"}})
	if err != nil {
		t.Fatal(err)
	}
	return r.Manifest
}

// write writes a PEM file.
func write(t testing.TB, name, kind string, der []byte, err error) string {
	t.Helper()
	if err == nil {
		err = os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// pair writes the files of a private and a public key.
func pair(t testing.TB, key crypto.Signer) (private, public string) {
	t.Helper()
	dir := t.TempDir()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	private = write(t, filepath.Join(dir, "private.pem"), "PRIVATE KEY", der, err)
	der, err = x509.MarshalPKIXPublicKey(key.Public())
	return private, write(t, filepath.Join(dir, "public.pem"), "PUBLIC KEY", der, err)
}

func rsaKey(t testing.TB) *rsa.PrivateKey {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func recipients(t testing.TB, files ...string) *Recipients {
	t.Helper()
	r, err := ReadRecipients(files...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func keys(t testing.TB, files ...string) *Keys {
	t.Helper()
	k, err := ReadKeys(files...)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func manifest(t testing.TB, store content.Provider, d ocispec.Descriptor) *ocispec.Manifest {
	t.Helper()
	m, err := Manifest(t.Context(), store, d)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Each kind of key decrypts what was encrypted for it, to the image that it was. Nothing of the
// secret is in what was encrypted, and the base's layer is left alone.
func TestThereAndBack(t *testing.T) {
	from := newLayout(t)
	image := checkpointImage(t, from)
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	first := rsaKey(t)
	rsaPrivate, rsaPublic := pair(t, first)
	ecPrivate, ecPublic := pair(t, ec)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "node"}, NotAfter: time.Now().Add(time.Hour),
	}, &x509.Certificate{SerialNumber: big.NewInt(1)}, first.Public(), first)
	certificate := write(t, filepath.Join(t.TempDir(), "cert.pem"), "CERTIFICATE", der, err)

	for name, c := range map[string]struct{ recipients, keys []string }{
		"RSA":                {[]string{rsaPublic}, []string{rsaPrivate}},
		"elliptic":           {[]string{"jwe:" + ecPublic}, []string{ecPrivate}},
		"certificate":        {[]string{"pkcs7:" + certificate}, []string{rsaPrivate, certificate}},
		"one of two":         {[]string{rsaPublic, ecPublic}, []string{ecPrivate}},
		"a directory's":      {[]string{filepath.Dir(certificate)}, []string{filepath.Dir(rsaPrivate), certificate}},
		"among other's keys": {[]string{ecPublic}, []string{rsaPrivate, ecPrivate}},
	} {
		t.Run(name, func(t *testing.T) {
			to, back := newLayout(t), newLayout(t)
			made, err := Encrypt(t.Context(), from, to, image, recipients(t, c.recipients...), nil)
			if err != nil {
				t.Fatal(err)
			}
			was, m := manifest(t, from, image), manifest(t, to, made)
			if StateOf(was) != Plain || StateOf(m) != Encrypted || NeedsKey(was) || !NeedsKey(m) {
				t.Errorf("states %d and %d", StateOf(was), StateOf(m))
			}
			if !slices.EqualFunc(m.Layers[:1], was.Layers[:1], func(a, b ocispec.Descriptor) bool { return a.Digest == b.Digest }) || m.Config.Digest != was.Config.Digest || m.Annotations["theirs"] != "kept" {
				t.Errorf("the base or the annotations became %+v", m)
			}
			l := m.Layers[1]
			if want := ocispec.MediaTypeImageLayer + "+encrypted"; l.MediaType != want {
				t.Errorf("media type %s, want %s", l.MediaType, want)
			}
			data, err := content.ReadBlob(t.Context(), to, l)
			if err != nil || bytes.Contains(data, []byte(secret)) || bytes.Contains(data, []byte("inventory.img")) {
				t.Errorf("it is readable: %v", err)
			}
			plain, err := Decrypt(t.Context(), to, back, made, keys(t, c.keys...), nil)
			if err != nil || plain.Digest != image.Digest {
				t.Fatalf("decrypted to %s, %v; it was %s", plain.Digest, err, image.Digest)
			}
			data, err = content.ReadBlob(t.Context(), back, was.Layers[1])
			if err != nil || !bytes.Contains(data, []byte(secret)) {
				t.Errorf("the secret is lost: %v", err)
			}
		})
	}
}

// Without its key nothing is decrypted, and nobody has to fetch it to know.
func TestOtherKey(t *testing.T) {
	from, to, back := newLayout(t), newLayout(t), newLayout(t)
	_, public := pair(t, rsaKey(t))
	other, _ := pair(t, rsaKey(t))
	made, err := Encrypt(t.Context(), from, to, checkpointImage(t, from), recipients(t, public), nil)
	if err != nil {
		t.Fatal(err)
	}
	k := keys(t, other)
	if err := k.FitAll(manifest(t, to, made)); !errors.Is(err, ErrNoKey) || !strings.Contains(err.Error(), other) {
		t.Errorf("before: %v", err)
	}
	if _, err := Decrypt(t.Context(), to, back, made, k, nil); !errors.Is(err, ErrNoKey) {
		t.Errorf("got %v", err)
	}
	if _, err := Encrypt(t.Context(), to, to, made, recipients(t, public), nil); !errors.Is(err, oci.ErrNotCheckpoint) {
		t.Errorf("encrypted twice: %v", err)
	}
	if _, err := Encrypt(t.Context(), without{from}, to, checkpointImage(t, from), recipients(t, public), nil); err == nil || !strings.Contains(err.Error(), "--no-unpack") {
		t.Errorf("without its layers: %v", err)
	}
	l := manifest(t, to, made).Layers[1]
	if _, err := oci.OpenLayer(t.Context(), to, l, nil); !errors.Is(err, oci.ErrEncrypted) {
		t.Errorf("open the layer: %v", err)
	}
}

// without has no layers.
type without struct{ content.Provider }

func (w without) ReaderAt(ctx context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	if d.MediaType != ocispec.MediaTypeImageManifest && d.MediaType != ocispec.MediaTypeImageConfig {
		return nil, errdefs.ErrNotFound
	}
	return w.Provider.ReaderAt(ctx, d)
}

// flipped changes a bit of what is read, at an offset from the end.
type flipped struct {
	content.Provider
	of  digest.Digest
	end int64
}

func (f flipped) ReaderAt(ctx context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	r, err := f.Provider.ReaderAt(ctx, d)
	if err != nil || d.Digest != f.of {
		return r, err
	}
	defer r.Close()
	data, err := io.ReadAll(io.NewSectionReader(r, 0, r.Size()))
	data[int64(len(data))-f.end] ^= 1
	return inMemory{bytes.NewReader(data)}, err
}

type inMemory struct{ *bytes.Reader }

func (inMemory) Close() error { return nil }

// A bit that was changed is found, and nothing of the layer is kept.
func TestChangedOnItsWay(t *testing.T) {
	from, to := newLayout(t), newLayout(t)
	image := checkpointImage(t, from)
	private, public := pair(t, rsaKey(t))
	made, err := Encrypt(t.Context(), from, to, image, recipients(t, public), nil)
	if err != nil {
		t.Fatal(err)
	}
	l, was := manifest(t, to, made).Layers[1], manifest(t, from, image).Layers[1]
	for _, end := range []int64{1, l.Size / 2, l.Size} {
		back := newLayout(t)
		if _, err := Decrypt(t.Context(), flipped{to, l.Digest, end}, back, made, keys(t, private), nil); err == nil {
			t.Errorf("a bit %d bytes before the end: no error", end)
		}
		if _, err := back.Info(t.Context(), was.Digest); err == nil {
			t.Errorf("a bit %d bytes before the end: the layer was kept", end)
		}
	}
}

func TestFilesOfKeys(t *testing.T) {
	private, public := pair(t, rsaKey(t))
	text := filepath.Join(t.TempDir(), "notes.txt")
	if err := os.WriteFile(text, []byte("no key"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, files := range map[string][]string{"private": {private}, "text": {text}, "missing": {text + "x"}, "empty": {t.TempDir()}} {
		if _, err := ReadRecipients(files...); err == nil {
			t.Errorf("recipients, %s: no error", name)
		}
	}
	for name, files := range map[string][]string{"public": {public}, "text": {text}} {
		if _, err := ReadKeys(files...); err == nil {
			t.Errorf("keys, %s: no error", name)
		}
	}
	// A directory may hold other files, or not be there.
	if k := keys(t, filepath.Dir(text), "/nowhere/at/all"); !k.None() {
		t.Error("a key in a file of text")
	}
	if k := keys(t, filepath.Dir(private)); k.None() {
		t.Error("no key in a directory with one")
	}
}

// Whatever a manifest says of a layer's keys, what is decrypted is what was encrypted, or nothing.
func FuzzDecrypt(f *testing.F) {
	from, to := newLayout(f), newLayout(f)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	private, public := pair(f, key)
	made, err := Encrypt(f.Context(), from, to, checkpointImage(f, from), recipients(f, public), nil)
	if err != nil {
		f.Fatal(err)
	}
	l := manifest(f, to, made).Layers[1]
	data, err := content.ReadBlob(f.Context(), to, l)
	if err != nil {
		f.Fatal(err)
	}
	k := keys(f, private)
	jwe, options := "org.opencontainers.image.enc.keys.jwe", "org.opencontainers.image.enc.pubopts"
	f.Add(l.Annotations[jwe], l.Annotations[options], "", data)
	f.Add(l.Annotations[jwe]+","+l.Annotations[jwe], "e30=", "e30=", data[:10])
	f.Add("", "", l.Annotations[jwe], data)
	f.Fuzz(func(t *testing.T, wrapped, public, pkcs7 string, data []byte) {
		back := newLayout(t)
		l := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer + encrypted, Digest: digest.FromBytes(data), Size: int64(len(data)), Annotations: map[string]string{
			jwe: wrapped, options: public, "org.opencontainers.image.enc.keys.pkcs7": pkcs7,
		}}
		if err := decrypt(t.Context(), back, &l, bytes.NewReader(data), k); err != nil {
			return
		}
		plain, err := content.ReadBlob(t.Context(), back, l)
		if err != nil || digest.FromBytes(plain) != l.Digest {
			t.Errorf("%s was written as %q, %v", l.Digest, plain, err)
		}
	})
}
