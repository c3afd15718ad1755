// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package sign

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrKey reports a file that is not a key to sign with or to trust.
var ErrKey = errors.New("unusable key")

// Key is a public key: ECDSA on P-256, or Ed25519.
type Key struct {
	// Name is where the key came from, for messages.
	Name   string
	public crypto.PublicKey
	der    []byte
}

// NewKey returns a public key.
func NewKey(name string, public crypto.PublicKey) (Key, error) {
	switch k := public.(type) {
	case *ecdsa.PublicKey:
		if k.Curve != elliptic.P256() {
			return Key{}, fmt.Errorf("%w: %s: it is on the curve %s: only P-256 and Ed25519 will do", ErrKey, name, k.Curve.Params().Name)
		}
	case ed25519.PublicKey:
	default:
		return Key{}, fmt.Errorf("%w: %s: it is a %T: only ECDSA on P-256 and Ed25519 will do", ErrKey, name, public)
	}
	der, err := x509.MarshalPKIXPublicKey(public)
	return Key{name, public, der}, err
}

// ID returns the first 16 hexadecimal digits of the SHA-256 digest of the key.
func (k Key) ID() string {
	sum := sha256.Sum256(k.der)
	return hex.EncodeToString(sum[:8])
}

// PEM returns the key as cosign and openssl read it.
func (k Key) PEM() []byte { return pem.EncodeToMemory(&pem.Block{Type: publicType, Bytes: k.der}) }

// verifies reports whether a signature of a text is by the key.
func (k Key) verifies(text, signature []byte) bool {
	if public, ok := k.public.(*ecdsa.PublicKey); ok {
		sum := sha256.Sum256(text)
		return ecdsa.VerifyASN1(public, sum[:], signature)
	}
	return ed25519.Verify(k.public.(ed25519.PublicKey), text, signature)
}

const (
	publicType  = "PUBLIC KEY"
	privateType = "PRIVATE KEY"
	// maxKeys bounds a file of keys, in bytes.
	maxKeys = 1 << 20
)

// ReadKeys reads public keys, in PEM, of files and of the files *.pub and *.pem in
// directories. What does not exist has no keys. The error is ErrKey, or that of reading.
func ReadKeys(paths ...string) ([]Key, error) {
	var keys []Key
	for _, path := range paths {
		files := []string{path}
		st, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrKey, err)
		}
		if st.IsDir() {
			entries, err := os.ReadDir(path)
			if err != nil {
				return nil, fmt.Errorf("%w: %w", ErrKey, err)
			}
			files = nil
			for _, e := range entries {
				if ext := filepath.Ext(e.Name()); ext == ".pub" || ext == ".pem" {
					files = append(files, filepath.Join(path, e.Name()))
				}
			}
		}
		for _, file := range files {
			found, err := readKeys(file)
			if errors.Is(err, fs.ErrNotExist) {
				continue // it has just gone
			}
			if err != nil {
				return nil, err
			}
			keys = append(keys, found...)
		}
	}
	return keys, nil
}

// readKeys reads a file with one or more public keys.
func readKeys(path string) (keys []Key, _ error) {
	data, err := readSmall(path, maxKeys)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	for {
		var block *pem.Block
		block, data = pem.Decode(data)
		if block == nil {
			break
		}
		if block.Type != publicType {
			return nil, fmt.Errorf("%w: %s: it has a %s; only public keys belong there", ErrKey, path, block.Type)
		}
		public, err := x509.ParsePKIXPublicKey(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrKey, path, err)
		}
		key, err := NewKey(path, public)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("%w: %s: it has no public key in PEM", ErrKey, path)
	}
	return keys, nil
}

// Signer signs manifests.
type Signer struct {
	// Key is the public half.
	Key     Key
	private crypto.Signer
}

// ReadSigner reads a private key in PEM: PKCS #8, or EC as `openssl ecparam` writes it. It
// refuses a file that others than its owner can read.
func ReadSigner(path string) (*Signer, error) {
	data, err := readSmall(path, maxKeys)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, fmt.Errorf("%w: %s: it is not in PEM", ErrKey, path)
	}
	var private any
	switch {
	case block.Type == privateType:
		private, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	case block.Type == "EC PRIVATE KEY":
		private, err = x509.ParseECPrivateKey(block.Bytes)
	case strings.HasPrefix(block.Type, "ENCRYPTED "):
		err = errors.New("it is encrypted: sign with the program that made it, such as cosign sign-blob")
	default:
		err = fmt.Errorf("it is a %s: sign with a private key", block.Type)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrKey, path, err)
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%w: %s: others than its owner may use it (mode %04o): chmod 600 it", ErrKey, path, st.Mode().Perm())
	}
	return newSigner(path, private)
}

func newSigner(path string, private any) (*Signer, error) {
	signer, ok := private.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%w: %s: it is a %T", ErrKey, path, private)
	}
	key, err := NewKey(path, signer.Public())
	return &Signer{key, signer}, err
}

// ReadOrMakeSigner reads a private key, which it makes if there is none: ECDSA on P-256, for
// root alone (mode 0600). Of several programs that do so at once one makes it, and all have
// the same. On an error there is no key, or the whole of one.
func ReadOrMakeSigner(path string) (*Signer, error) {
	s, err := ReadSigner(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = makeKey(path); err == nil {
			s, err = ReadSigner(path)
		}
	}
	return s, err
}

// makeKey makes a private key, unless somebody else has meanwhile.
func makeKey(path string) error {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(pem.EncodeToMemory(&pem.Block{Type: privateType, Bytes: der}))
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	// A link never takes the place of a key that is there.
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if d, err := os.Open(dir); err == nil { // so that the key outlives a power failure
		_ = unix.Fsync(int(d.Fd()))
		d.Close()
	}
	return nil
}

// sign returns a signature of a text.
func (s *Signer) sign(text []byte) ([]byte, error) {
	if _, ok := s.private.(ed25519.PrivateKey); ok {
		return s.private.Sign(rand.Reader, text, crypto.Hash(0))
	}
	sum := sha256.Sum256(text)
	return s.private.Sign(rand.Reader, sum[:], crypto.SHA256)
}
