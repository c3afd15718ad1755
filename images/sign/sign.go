// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package sign

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/moby/sys/atomicwriter"

	"github.com/gpuckpt/gpuckpt/images"
)

const (
	// maxSignature bounds a signature's file, in bytes, and maxSignatures their number.
	maxSignature  = 4096
	maxSignatures = 16
)

// Seal is the manifest of a checkpoint and its signatures, as they were found: nothing is
// checked.
type Seal struct {
	// Manifest is the content of the manifest's file.
	Manifest []byte
	// Signatures are the contents of the signatures' files, by name.
	Signatures map[string][]byte
}

// Read reads the seal among a checkpoint's files, and no other of them. The error is
// ErrUnsigned if there is none, or that of reading. A manifest without signatures is
// returned with ErrUnsigned.
func Read(files []images.File) (*Seal, error) {
	s := &Seal{Signatures: make(map[string][]byte)}
	for _, f := range files {
		var err error
		switch {
		case f.Name == ManifestName:
			s.Manifest, err = read(f, maxManifest)
		case signatureForm().MatchString(f.Name):
			if len(s.Signatures) == maxSignatures {
				return nil, fmt.Errorf("the checkpoint has more than %d signatures", maxSignatures)
			}
			s.Signatures[f.Name], err = read(f, maxSignature)
		}
		if err != nil {
			return nil, err
		}
	}
	switch {
	case s.Manifest == nil:
		return nil, fmt.Errorf("%w: it has no %s", ErrUnsigned, ManifestName)
	case len(s.Signatures) == 0:
		return s, fmt.Errorf("%w: it has a %s and no %s.*.sig", ErrUnsigned, ManifestName, ManifestName)
	}
	return s, nil
}

// read reads a file of a checkpoint.
func read(f images.File, limit uint64) ([]byte, error) {
	if f.Bytes > limit {
		return nil, fmt.Errorf("%s has %d bytes, more than %d", f.Path, f.Bytes, limit)
	}
	r, err := f.Open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data := make([]byte, f.Bytes)
	if _, err := r.ReadAt(data, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", f.Path, err)
	}
	return data, nil
}

// readSmall reads a file of the node.
func readSmall(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	return data, err
}

// SignedBy returns the first of the keys that has signed the manifest. The error is
// ErrUntrusted. The manifest is not parsed.
func (s *Seal) SignedBy(keys []Key) (Key, error) {
	for _, text := range s.Signatures {
		// cosign writes no line feed, editors do.
		signature, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(text)))
		if err != nil {
			continue
		}
		for _, k := range keys {
			if k.verifies(s.Manifest, signature) {
				return k, nil
			}
		}
	}
	return Key{}, ErrUntrusted
}

// Names returns the names of the signatures.
func (s *Seal) Names() []string {
	return slices.Sorted(maps.Keys(s.Signatures))
}

// SignatureName returns the name of the file that a key's signature is written to.
func SignatureName(k Key) string { return ManifestName + "." + k.ID() + ".sig" }

// Write makes the manifest of a checkpoint's directory, signs it and writes both into the
// directory, in the place of a seal that is there. It refuses files of other users. others are files that will be there but
// are not yet, by name, gpuckpt.json for one. known are digests of files that nobody has written to since,
// by name: these files are not read. On an error there is no seal.
func Write(ctx context.Context, dir string, signer *Signer, others map[string][]byte, known map[string][]string) error {
	files, err := images.ListDirs(dir)
	if err == nil {
		err = ownFiles(files)
	}
	if err == nil {
		err = remove(dir, files)
	}
	if err != nil {
		return fmt.Errorf("sign the checkpoint: %w", err)
	}
	files = slices.DeleteFunc(files, func(f images.File) bool { return others[f.Name] != nil || IsSeal(f.Name) })
	for name, data := range others {
		files = append(files, inMemory(name, data))
	}
	m := list(files)
	for i, f := range m.Files {
		if digests := known[f.Name]; uint64(len(digests)) == images.Blocks(f.Bytes) {
			m.Files[i].Digests = slices.Clone(digests)
		}
	}
	if err := m.digest(ctx, files); err != nil {
		return fmt.Errorf("sign the checkpoint: %w", err)
	}
	manifest, err := m.Encode()
	if err != nil {
		return fmt.Errorf("sign the checkpoint: %w", err)
	}
	name, signature, err := signer.Signature(manifest)
	if err != nil {
		return err
	}
	return Save(dir, append(files, inMemory(ManifestName, manifest), inMemory(name, signature)))
}

// ownFiles refuses files of another user.
func ownFiles(files []images.File) error {
	for _, f := range files {
		st, err := os.Lstat(f.Path)
		if err != nil {
			return err
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); !ok || int(sys.Uid) != os.Geteuid() {
			return fmt.Errorf("%s is a file of another user (uid %d), who could have anything signed", f.Path, sys.Uid)
		}
	}
	return nil
}

// Sign returns the name and the content of a signature of a manifest.
type Sign func(manifest []byte) (name string, signature []byte, err error)

// Signature is a Sign: SignatureName, and what `cosign sign-blob` writes.
func (s *Signer) Signature(manifest []byte) (string, []byte, error) {
	signature, err := s.sign(manifest)
	if err != nil {
		return "", nil, fmt.Errorf("sign with %s: %w", s.Key.Name, err)
	}
	return SignatureName(s.Key), []byte(base64.StdEncoding.EncodeToString(signature) + "\n"), nil
}

// Add adds a signature to a checkpoint, and returns all of its files. If there is no manifest,
// or if it is of other files, Add makes one, and drops the other signatures. What is new is in memory (File.Data).
func Add(ctx context.Context, files []images.File, sign Sign) ([]images.File, error) {
	out, manifest, err := WithManifest(ctx, files)
	if err != nil {
		return nil, fmt.Errorf("sign the checkpoint: %w", err)
	}
	name, signature, err := sign(manifest)
	if err != nil {
		return nil, err
	}
	if !signatureForm().MatchString(name) {
		return nil, fmt.Errorf("%q is not the name of a signature: it must be %s.NAME.sig", name, ManifestName)
	}
	out = slices.DeleteFunc(out, func(f images.File) bool { return f.Name == name })
	return append(out, inMemory(name, signature)), nil
}

// WithManifest returns the files of a checkpoint with a manifest, as Add does, and the
// manifest.
func WithManifest(ctx context.Context, files []images.File) ([]images.File, []byte, error) {
	if s, err := Read(files); s != nil {
		m, err := Parse(s.Manifest)
		if err == nil {
			err = m.Check(ctx, files)
		}
		if err == nil {
			return slices.Clone(files), s.Manifest, nil
		}
	} else if !errors.Is(err, ErrUnsigned) {
		return nil, nil, err
	}
	files = slices.DeleteFunc(slices.Clone(files), func(f images.File) bool { return IsSeal(f.Name) })
	m, err := Make(ctx, files)
	if err != nil {
		return nil, nil, err
	}
	data, err := m.Encode()
	return append(files, inMemory(ManifestName, data)), data, err
}

// Save writes the seal of files, as Add returned them, into their directory.
func Save(dir string, files []images.File) error {
	for _, f := range files {
		if f.Data == nil || !IsSeal(f.Name) {
			continue
		}
		data, err := read(f, maxManifest)
		if err == nil {
			err = atomicwriter.WriteFile(filepath.Join(dir, f.Name), data, 0o600)
		}
		if err != nil {
			return fmt.Errorf("sign the checkpoint: %w", errors.Join(err, remove(dir, files)))
		}
	}
	return nil
}

// inMemory returns a file that is nowhere yet.
func inMemory(name string, data []byte) images.File {
	return images.File{Name: name, Path: name, Bytes: uint64(len(data)), Data: bytes.NewReader(data)}
}

// IsSeal reports whether a name is that of a manifest or a signature.
func IsSeal(name string) bool { return name == ManifestName || signatureForm().MatchString(name) }

// remove removes the seal of a directory with these files.
func remove(dir string, files []images.File) error {
	for _, f := range files {
		if !IsSeal(f.Name) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, f.Name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Collector takes the files of a checkpoint one after the other, as an archive has them.
type Collector struct {
	seal  Seal
	files []File
}

// Take reads a file of the seal, by IsSeal, to its end.
func (s *Seal) Take(name string, size int64, r io.Reader) error {
	limit := maxManifest
	if name != ManifestName {
		limit = maxSignature
	}
	if size > int64(limit) || len(s.Signatures) == maxSignatures {
		return fmt.Errorf("%w: %s is too large, or one signature too many", ErrMalformed, name)
	}
	data, err := io.ReadAll(io.LimitReader(r, size))
	if name == ManifestName {
		s.Manifest = data
		return err
	}
	if s.Signatures == nil {
		s.Signatures = make(map[string][]byte)
	}
	s.Signatures[name] = data
	return err
}

// Take reads a file to its end.
func (c *Collector) Take(name string, size int64, r io.Reader) error {
	switch {
	case images.IsAreaFile(name):
		return nil
	case IsSeal(name):
		return c.seal.Take(name, size, r)
	}
	f := File{Name: name, Bytes: uint64(size), Digests: []string{}}
	buf := make([]byte, min(1<<20, max(size, 1)))
	for left := uint64(size); left > 0; {
		h := images.NewBlockHash()
		n, err := io.CopyBuffer(writer{h}, io.LimitReader(r, int64(min(images.BlockBytes, left))), buf)
		if err == nil && n == 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		f.Digests = append(f.Digests, h.Digest())
		left -= uint64(n)
	}
	c.files = append(c.files, f)
	return nil
}

// writer makes a hash an io.Writer.
type writer struct{ *images.BlockHash }

func (w writer) Write(b []byte) (int, error) {
	w.BlockHash.Write(b)
	return len(b), nil
}

// Seal returns the seal among the files that were taken, nil if there is none, and whether
// the others are the manifest's: ErrMalformed or ErrChanged. memory is what the manifest says of files that were not
// taken, and may be in pieces elsewhere.
func (c *Collector) Seal() (_ *Seal, memory []File, _ error) {
	if c.seal.Manifest == nil {
		return nil, nil, nil
	}
	m, err := Parse(c.seal.Manifest)
	if err != nil {
		return &c.seal, nil, err
	}
	for _, f := range m.Files {
		if images.IsMemory(f.Name) && !slices.ContainsFunc(c.files, func(had File) bool { return had.Name == f.Name }) {
			memory = append(memory, f)
		}
	}
	return &c.seal, memory, m.compare(append(slices.Clip(c.files), memory...), true)
}
