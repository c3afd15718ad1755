// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package encryption

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	fake "github.com/google/go-containerregistry/pkg/registry"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/crypt"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

// source makes a checkpoint image in a layout and opens it.
func source(t *testing.T) *convert.Source {
	t.Helper()
	dump, dir := t.TempDir(), filepath.Join(t.TempDir(), "layout")
	if err := os.WriteFile(filepath.Join(dump, "inventory.img"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := images.Open(dump, images.AllowWithoutGPU)
	if err != nil {
		t.Fatal(err)
	}
	l, err := layout.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	r, err := oci.Build(t.Context(), l, oci.Options{Checkpoint: c})
	if err == nil {
		err = l.Tag(t.Context(), "example.com/job:1", r.Manifest)
	}
	if err != nil {
		t.Fatal(err)
	}
	s, err := convert.Open(t.Context(), convert.Ref{Kind: convert.InLayout, Path: dir}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) // there may be nothing to remove
	return s
}

// configured makes text the node's configuration.
func configured(t *testing.T, text string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(config.Env, file)
}

func publicKey(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	file := filepath.Join(t.TempDir(), "key.pub")
	if err == nil {
		err = os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// A checkpoint leaves the node as its configuration wants it, or not at all.
func TestPush(t *testing.T) {
	server := httptest.NewServer(fake.New(fake.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	target := strings.TrimPrefix(server.URL, "http://") + "/job:1"
	key := publicKey(t)
	t.Setenv("TMPDIR", t.TempDir())
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	for name, c := range map[string]struct {
		config     string
		recipients []string
		want       crypt.State
		err        error
	}{
		"as it is":      {"", nil, crypt.Plain, nil},
		"as asked":      {"", []string{key}, crypt.Encrypted, nil},
		"as configured": {fmt.Sprintf("[encryption]\nrecipients = [%q]\n", key), nil, crypt.Encrypted, nil},
		"no such key":   {"", []string{key + "x"}, crypt.NoCheckpoint, os.ErrNotExist},
	} {
		t.Run(name, func(t *testing.T) {
			configured(t, c.config)
			s := source(t)
			sent, _, err := Push(t.Context(), s, target, c.recipients, registry.Options{Attempts: 1})
			if !errors.Is(err, c.err) || c.err == nil && err != nil {
				t.Fatalf("got %v, want %v", err, c.err)
			}
			if err != nil {
				return
			}
			from, err := registry.Open(t.Context(), target, "look up", registry.Options{Attempts: 1})
			if err != nil || from.Image.Digest != sent || (sent == s.Image.Digest) != (c.want == crypt.Plain) {
				t.Fatalf("the registry's is not %s, which was sent: %v", sent, err)
			}
			m, err := crypt.Manifest(t.Context(), from, from.Image)
			if err != nil || crypt.StateOf(m) != c.want {
				t.Errorf("in the registry it is in state %d, %v; want %d", crypt.StateOf(m), err, c.want)
			}
			if left, err := filepath.Glob(filepath.Join(os.TempDir(), "gpuckpt-encrypt-*")); err != nil || len(left) > 0 {
				t.Errorf("left in the directory of temporary files: %v, %v", left, err)
			}
		})
	}
}
