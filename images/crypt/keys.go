// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package crypt

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containers/ocicrypt"
	"github.com/containers/ocicrypt/config"
	"github.com/containers/ocicrypt/utils"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// ErrNoKey reports that none of the keys decrypts an image.
var ErrNoKey = errors.New("no key decrypts it")

// Recipients are those who can decrypt what is encrypted.
type Recipients struct{ config *config.EncryptConfig }

// ReadRecipients reads public keys (for JWE: RSA or elliptic curves, in PEM, DER or as a JWK) and
// certificates (for PKCS #7) out of files, or out of all files of a directory. A file may have its
// scheme before it, as nerdctl wants it: jwe:FILE, pkcs7:FILE.
func ReadRecipients(paths ...string) (*Recipients, error) {
	var keys, certificates [][]byte
	err := read(paths, func(path string, data []byte) error {
		switch {
		case utils.IsCertificate(data):
			certificates = append(certificates, data)
		case utils.IsPublicKey(data):
			keys = append(keys, data)
		default:
			return fmt.Errorf("%s is neither a public key nor a certificate", path)
		}
		return nil
	})
	if err == nil && len(keys)+len(certificates) == 0 {
		err = fmt.Errorf("%s: there is no key", strings.Join(paths, ", "))
	}
	if err != nil {
		return nil, fmt.Errorf("read whom to encrypt for: %w", err)
	}
	return &Recipients{&config.EncryptConfig{Parameters: map[string][][]byte{"pubkeys": keys, "x509s": certificates}}}, nil
}

// Keys decrypt.
type Keys struct {
	config *config.DecryptConfig
	names  []string
}

// ReadKeys reads private keys without a password out of files, or out of all files of a directory;
// with a certificate beside its key, as PKCS #7 needs it. Other files of a directory, and a
// directory that is not there, do not count: there may be no key at all.
func ReadKeys(paths ...string) (*Keys, error) {
	k := new(Keys)
	var keys, passwords, certificates [][]byte
	for _, path := range paths {
		st, serr := os.Stat(path)
		err := read([]string{path}, func(name string, data []byte) error {
			private, err := utils.IsPrivateKey(data, nil)
			switch {
			case utils.IsCertificate(data):
				certificates = append(certificates, data)
			case private:
				keys, passwords = append(keys, data), append(passwords, nil)
				k.names = append(k.names, name)
			case serr == nil && !st.IsDir() && err != nil:
				return fmt.Errorf("%s is not a private key without a password: %w", name, err)
			case serr == nil && !st.IsDir():
				return fmt.Errorf("%s is not a private key", name)
			}
			return nil
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read the keys that decrypt: %w", err)
		}
	}
	k.config = &config.DecryptConfig{Parameters: map[string][][]byte{"privkeys": keys, "privkeys-passwords": passwords, "x509s": certificates}}
	return k, nil
}

// None reports whether there is no key.
func (k *Keys) None() bool { return len(k.names) == 0 }

// Fits reports whether one of the keys decrypts a layer; the error is ErrNoKey.
func (k *Keys) Fits(l ocispec.Descriptor) error {
	if _, _, err := ocicrypt.DecryptLayer(k.config, nil, l, true); err != nil {
		return fmt.Errorf("%w, of the %d in %s", ErrNoKey, len(k.names), strings.Join(k.names, ", "))
	}
	return nil
}

// FitAll is Fits for every layer of an image that is encrypted.
func (k *Keys) FitAll(m *ocispec.Manifest) error {
	for _, l := range m.Layers {
		if isEncrypted(l) {
			if err := k.Fits(l); err != nil {
				return fmt.Errorf("layer %s: %w", l.Digest, err)
			}
		}
	}
	return nil
}

// maxKey bounds a file with a key, in bytes.
const maxKey = 1 << 20

// read has the files, and those of directories, read.
func read(paths []string, file func(path string, data []byte) error) error {
	for _, path := range paths {
		for _, scheme := range []string{"jwe:", "pkcs7:"} {
			path = strings.TrimPrefix(path, scheme)
		}
		names := []string{path}
		st, err := os.Stat(path)
		if err == nil && st.IsDir() {
			names, err = filepath.Glob(filepath.Join(path, "*"))
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			st, err := os.Stat(name)
			if err != nil {
				return err
			}
			if st.IsDir() {
				continue // as Kubernetes' ..data is
			}
			if st.Size() > maxKey {
				return fmt.Errorf("%s has more than %d bytes", name, maxKey)
			}
			data, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			if err := file(name, data); err != nil {
				return err
			}
		}
	}
	return nil
}
