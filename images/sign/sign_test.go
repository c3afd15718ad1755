// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package sign_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// contents are those of a dump: none is what a reader would parse.
var contents = map[string][]byte{
	"inventory.img": []byte("inventory"), "core-1.img": []byte("core"), "pages-1.img": bytes.Repeat([]byte("page"), 1000),
	"empty.img": nil, "descriptors.json": []byte("[]"), "gpuckpt.json": []byte("{}"), "gpu-1-0": []byte("state"),
}

// dump makes a directory with the contents.
func dump(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for name, data := range contents {
		write(t, filepath.Join(dir, name), data)
	}
	return dir
}

func write(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// signer makes a key of its own.
func signer(t testing.TB) *sign.Signer {
	t.Helper()
	s, err := sign.ReadOrMakeSigner(filepath.Join(t.TempDir(), "deep", "signing.key"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// check does what a restore does.
func check(ctx context.Context, dir string, keys ...sign.Key) error {
	files, err := images.ListDirs(dir)
	if err != nil {
		return err
	}
	s, err := sign.Read(files)
	if err != nil {
		return err
	}
	if _, err := s.SignedBy(keys); err != nil {
		return err
	}
	m, err := sign.Parse(s.Manifest)
	if err != nil {
		return err
	}
	return m.Check(ctx, files)
}

func sealed(t testing.TB, s *sign.Signer) string {
	t.Helper()
	dir := dump(t)
	if err := sign.Write(t.Context(), dir, s, nil, nil); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestSealed(t *testing.T) {
	s := signer(t)
	dir := sealed(t, s)
	if err := check(t.Context(), dir, signer(t).Key, s.Key); err != nil {
		t.Error(err)
	}
	// What the kubelet's archives add is never read, and need not be listed.
	write(t, filepath.Join(dir, "config.dump"), []byte("{}"))
	if err := check(t.Context(), dir, s.Key); err != nil {
		t.Error(err)
	}
}

// Every file of a checkpoint: changed, of another length, gone. One that nobody signed.
func TestEveryFileIsBound(t *testing.T) {
	s := signer(t)
	bound := 0
	for name, data := range contents {
		changes := map[string]func(path string){
			"a byte changed": func(path string) {
				data := slices.Clone(data)
				if len(data) > 0 {
					data[len(data)/2] ^= 1
				} else {
					data = []byte{0}
				}
				write(t, path, data)
			},
			"a byte more": func(path string) { write(t, path, append(slices.Clone(data), 0)) },
			"gone":        func(path string) { _ = os.Remove(path) },
			"a link":      func(path string) { _ = os.Rename(path, path+"2"); _ = os.Symlink(path+"2", path) },
		}
		for what, change := range changes {
			dir := sealed(t, s)
			change(filepath.Join(dir, name))
			err := check(t.Context(), dir, s.Key)
			if images.IsAreaFile(name) { // gpuckpt.json has its digests
				continue
			}
			bound++
			if !errors.Is(err, images.ErrDamaged) {
				t.Errorf("%s: %s: got %v", name, what, err)
			}
		}
	}
	if bound != 4*(len(contents)-1) {
		t.Errorf("%d cases", bound)
	}
	dir := sealed(t, s)
	write(t, filepath.Join(dir, "apparmor.img"), nil)
	if err := check(t.Context(), dir, s.Key); !errors.Is(err, sign.ErrChanged) || !strings.Contains(err.Error(), "apparmor.img") {
		t.Errorf("a file too many: %v", err)
	}
	dir = sealed(t, s)
	write(t, filepath.Join(dir, sign.ManifestName), append(read(t, filepath.Join(dir, sign.ManifestName)), '\n'))
	if err := check(t.Context(), dir, s.Key); !errors.Is(err, sign.ErrUntrusted) {
		t.Errorf("a changed manifest: %v", err)
	}
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Files whose digests are known are not read. Digests of another number of blocks are none.
func TestKnownDigests(t *testing.T) {
	s, dir := signer(t), dump(t)
	name := "inventory.img"
	known := images.DigestBlock([]byte("something else"))
	for digests, want := range map[int]error{1: sign.ErrChanged, 2: nil} {
		if err := sign.Write(t.Context(), dir, s, nil, map[string][]string{name: slices.Repeat([]string{known}, digests)}); err != nil {
			t.Fatal(err)
		}
		if err := check(t.Context(), dir, s.Key); !errors.Is(err, want) {
			t.Errorf("%d digests: %v, want %v", digests, err, want)
		}
	}
	right := map[string][]string{name: {images.DigestBlock(contents[name])}}
	if err := cmp.Or(sign.Write(t.Context(), dir, s, nil, right), check(t.Context(), dir, s.Key)); err != nil {
		t.Error(err)
	}
}

// A file in which only a block far behind has changed, and one that is cut short while it
// is read.
func TestLargeFile(t *testing.T) {
	s, dir := signer(t), dump(t)
	path := filepath.Join(dir, "pages-2.img")
	write(t, path, nil)
	if err := os.Truncate(path, 2*images.BlockBytes+5); err != nil {
		t.Fatal(err)
	}
	if err := sign.Write(t.Context(), dir, s, nil, nil); err != nil {
		t.Fatal(err)
	}
	files, err := images.ListDirs(dir)
	if err != nil {
		t.Fatal(err)
	}
	m, err := sign.Parse(read(t, filepath.Join(dir, sign.ManifestName)))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Check(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{1}, 2*images.BlockBytes+4); err != nil {
		t.Fatal(err)
	}
	if err := m.Check(t.Context(), files); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("the last byte changed: %v", err)
	}
	if err := f.Truncate(images.BlockBytes); err != nil {
		t.Fatal(err)
	}
	if err := m.Check(t.Context(), files); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("cut short: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.Check(ctx, files); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
}

func TestWhoseSignature(t *testing.T) {
	s, other := signer(t), signer(t)
	dir := sealed(t, s)
	name := sign.SignatureName(s.Key)
	if err := check(t.Context(), dir); !errors.Is(err, sign.ErrUntrusted) {
		t.Errorf("no key counts: %v", err)
	}
	if err := check(t.Context(), dir, other.Key); !errors.Is(err, sign.ErrUntrusted) {
		t.Errorf("another key: %v", err)
	}
	// Another checkpoint's signature, by the right key.
	second := dump(t)
	write(t, filepath.Join(second, "core-1.img"), []byte("CORE"))
	if err := sign.Write(t.Context(), second, s, nil, nil); err != nil {
		t.Fatal(err)
	}
	foreign := read(t, filepath.Join(second, name))
	good := read(t, filepath.Join(dir, name))
	write(t, filepath.Join(dir, name), foreign)
	if err := check(t.Context(), dir, s.Key); !errors.Is(err, sign.ErrUntrusted) {
		t.Errorf("another checkpoint's signature: %v", err)
	}
	// ... with its manifest.
	write(t, filepath.Join(dir, sign.ManifestName), read(t, filepath.Join(second, sign.ManifestName)))
	if err := check(t.Context(), dir, s.Key); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("another checkpoint's manifest and signature: %v", err)
	}
	dir = sealed(t, s)
	// Signatures that say nothing do not hide one that counts.
	write(t, filepath.Join(dir, "gpuckpt.manifest.sig"), []byte("not base64!"))
	write(t, filepath.Join(dir, "gpuckpt.manifest.other.sig"), foreign)
	if err := check(t.Context(), dir, other.Key, s.Key); err != nil {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "gpuckpt.manifest.sig"), []byte("AAAA"))
	if err := check(t.Context(), dir, s.Key); !errors.Is(err, sign.ErrUntrusted) {
		t.Errorf("no signature at all: %v", err)
	}
	write(t, filepath.Join(dir, "gpuckpt.manifest.sig"), good)
	if err := check(t.Context(), dir, s.Key); err != nil {
		t.Errorf("under another name: %v", err)
	}
	for _, name := range []string{"gpuckpt.manifest.sig", "gpuckpt.manifest.other.sig"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := check(t.Context(), dir, s.Key); !errors.Is(err, sign.ErrUnsigned) {
		t.Errorf("without a signature: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, sign.ManifestName)); err != nil {
		t.Fatal(err)
	}
	if err := check(t.Context(), dir, s.Key); !errors.Is(err, sign.ErrUnsigned) {
		t.Errorf("without a manifest: %v", err)
	}
}

// A seal is of one moment: writing it anew leaves no old signature.
func TestSealedAgain(t *testing.T) {
	old, s := signer(t), signer(t)
	dir := sealed(t, old)
	write(t, filepath.Join(dir, "core-1.img"), []byte("CORE"))
	if err := sign.Write(t.Context(), dir, s, map[string][]byte{"gpuckpt.json": []byte("new")}, nil); err != nil {
		t.Fatal(err)
	}
	if err := check(t.Context(), dir, s.Key); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("before gpuckpt.json is written: %v", err)
	}
	write(t, filepath.Join(dir, "gpuckpt.json"), []byte("new"))
	if err := check(t.Context(), dir, s.Key); err != nil {
		t.Error(err)
	}
	if err := check(t.Context(), dir, old.Key); !errors.Is(err, sign.ErrUntrusted) {
		t.Errorf("by the old key: %v", err)
	}
}

// A file that somebody else has put there is not signed.
func TestFileOfAnother(t *testing.T) {
	dir := dump(t)
	path := filepath.Join(dir, "apparmor.img")
	write(t, path, nil)
	if err := os.Chown(path, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	if err := sign.Write(t.Context(), dir, signer(t), nil, nil); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, sign.ManifestName)); !os.IsNotExist(err) {
		t.Errorf("there is a manifest: %v", err)
	}
}

// Shims that need the key at the same time have the same one.
func TestKeyIsMadeOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "signing.key")
	var ids sync.Map
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			s, err := sign.ReadOrMakeSigner(path)
			if err != nil {
				t.Error(err)
				return
			}
			ids.Store(s.Key.ID(), true)
		})
	}
	group.Wait()
	n := 0
	ids.Range(func(any, any) bool { n++; return true })
	if n != 1 {
		t.Errorf("%d keys", n)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the key: %v, %v", st, err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := sign.ReadSigner(path); !errors.Is(err, sign.ErrKey) {
		t.Errorf("a key that a group can read: %v", err)
	}
	write(t, path, signer(t).Key.PEM()) // which keeps the mode
	if _, err := sign.ReadSigner(path); !errors.Is(err, sign.ErrKey) || !strings.Contains(err.Error(), "PUBLIC KEY: sign with a private key") {
		t.Errorf("a public key: %v", err)
	}
}

func TestReadKeys(t *testing.T) {
	dir := t.TempDir()
	a, b := signer(t), signer(t)
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "both.pub"), slices.Concat([]byte("# nodes\n"), a.Key.PEM(), b.Key.PEM()))
	write(t, filepath.Join(dir, "README"), []byte("not a key"))
	keys, err := sign.ReadKeys(dir, filepath.Join(dir, "none"), filepath.Join(dir, "both.pub"))
	if err != nil || len(keys) != 4 || keys[0].ID() != a.Key.ID() || keys[1].ID() != b.Key.ID() {
		t.Errorf("got %v, %v", keys, err)
	}
	for name, text := range map[string][]byte{
		"empty":       nil,
		"another":     pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")}),
		"garbage":     pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: []byte("x")}),
		"P-384":       public(t, &p384.PublicKey),
		"private key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")}),
	} {
		path := filepath.Join(t.TempDir(), "key.pem")
		write(t, path, text)
		if _, err := sign.ReadKeys(path); !errors.Is(err, sign.ErrKey) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func public(t testing.TB, key any) []byte {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

func TestEd25519(t *testing.T) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "key.pem")
	write(t, path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	s, err := sign.ReadSigner(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := check(t.Context(), sealed(t, s), s.Key); err != nil {
		t.Error(err)
	}
}

// openssl signs and verifies the same bytes: what `cosign --key` does.
func TestOpenSSL(t *testing.T) {
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Fatal("openssl is needed: ", err)
	}
	work := t.TempDir()
	run := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "openssl", args...)
		cmd.Dir = work
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("openssl %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	s := signer(t)
	dir := sealed(t, s)
	manifest := filepath.Join(dir, sign.ManifestName)
	write(t, filepath.Join(work, "pub"), s.Key.PEM())
	write(t, filepath.Join(work, "b64"), read(t, filepath.Join(dir, sign.SignatureName(s.Key))))
	run("base64", "-d", "-A", "-in", "b64", "-out", "sig")
	run("dgst", "-sha256", "-verify", "pub", "-signature", "sig", manifest)

	run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "theirs.key")
	run("ec", "-in", "theirs.key", "-pubout", "-out", "theirs.pub")
	run("dgst", "-sha256", "-sign", "theirs.key", "-out", "sig", manifest)
	run("base64", "-A", "-in", "sig", "-out", filepath.Join(dir, "gpuckpt.manifest.theirs.sig"))
	keys, err := sign.ReadKeys(filepath.Join(work, "theirs.pub"))
	if err != nil {
		t.Fatal(err)
	}
	if err := check(t.Context(), dir, keys...); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(filepath.Join(work, "theirs.key"), 0o600); err != nil {
		t.Fatal(err)
	}
	theirs, err := sign.ReadSigner(filepath.Join(work, "theirs.key"))
	if err != nil || theirs.Key.ID() != keys[0].ID() {
		t.Errorf("openssl's private key: %v", err)
	}
}

// FuzzParse: what Parse takes is in the one form that Encode writes.
func FuzzParse(f *testing.F) {
	dir := sealed(f, signer(f))
	good := read(f, filepath.Join(dir, sign.ManifestName))
	f.Add(good)
	for _, change := range [][2]string{
		{`"core-1.img"`, `"../core-1.img"`}, {`"core-1.img"`, `"gpu-1-0"`}, {`"core-1.img"`, `"inventory.img"`}, {`"core-1.img"`, `"gpuckpt.manifest"`},
		{`: 1,`, `: 2,`}, {"blake3:", "md5:"}, {`"bytes": 4`, `"bytes": 99999999999`}, {"{", `{"x":1,`}, {`"name"`, `"Name"`}, {"[]", "null"},
		{`"bytes": 0`, `"bytes": 18446744073709551615`}, // none in blocks, were it rounded up by an addition
	} {
		bad := bytes.Replace(good, []byte(change[0]), []byte(change[1]), 1)
		if bytes.Equal(bad, good) {
			f.Fatalf("nothing to change at %s", change[0])
		}
		if _, err := sign.Parse(bad); !errors.Is(err, sign.ErrMalformed) {
			f.Errorf("%s: %v", change[1], err)
		}
		f.Add(bad)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := sign.Parse(data)
		if err != nil {
			if !errors.Is(err, sign.ErrMalformed) {
				t.Errorf("the error is none of ErrMalformed: %v", err)
			}
			return
		}
		if same, err := m.Encode(); err != nil || !bytes.Equal(same, data) {
			t.Errorf("it is encoded otherwise: %v", err)
		}
		for _, file := range m.Files {
			if file.Name != filepath.Base(file.Name) {
				t.Errorf("file name %q", file.Name)
			}
		}
	})
}

// BenchmarkCheck is what a restore of a small container, of 40 images and 8 MiB of memory,
// and of one with 1 GiB of memory waits for.
func BenchmarkCheck(b *testing.B) {
	for name, size := range map[string]int64{"8MiB": 8 << 20, "1GiB": 1 << 30} {
		b.Run(name, func(b *testing.B) {
			s, dir := signer(b), dump(b)
			for i := range 40 {
				write(b, filepath.Join(dir, fmt.Sprintf("core-%d.img", i+10)), bytes.Repeat([]byte{1}, 2000))
			}
			if err := os.WriteFile(filepath.Join(dir, "pages-1.img"), bytes.Repeat([]byte("page"), int(size/4)), 0o600); err != nil {
				b.Fatal(err)
			}
			if err := sign.Write(b.Context(), dir, s, nil, nil); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(size)
			for b.Loop() {
				if err := check(b.Context(), dir, s.Key); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
