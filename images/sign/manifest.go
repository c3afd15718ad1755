// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package sign proves who made a checkpoint.
//
// A checkpoint is sealed when it is complete: Make reads its files and returns the
// manifest, which has the digests of all of them, and Write puts the manifest and a
// signature of it among the files. The digests of GPU state are in gpuckpt.json, which is
// in the manifest. So one signature covers every byte that a restore uses, in a directory
// as in an image, where GPU state is cut into pieces.
//
// A reader trusts nothing before SignedBy has found a signature by a trusted key.
// Only then is the manifest parsed, and only after Check is any other file.
//
// A signature is what `cosign sign-blob` makes of the manifest and `cosign verify-blob`
// takes: ECDSA over SHA-256, in base64.
package sign

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images"
)

// ManifestName is the name of the manifest among a checkpoint's files.
const ManifestName = "gpuckpt.manifest"

// version is the version of the manifest that this package writes and reads.
const version = 1

// maxManifest bounds a manifest, in bytes: a file of a dump takes 150 of them.
const maxManifest = 8 << 20

var (
	// ErrUnsigned reports a checkpoint without a manifest or without a signature.
	ErrUnsigned = errors.New("the checkpoint is not signed")
	// ErrUntrusted reports that no trusted key has signed a checkpoint.
	ErrUntrusted = errors.New("no trusted key has signed the checkpoint")
	// ErrMalformed reports a manifest that this package did not write.
	ErrMalformed = errors.New("malformed " + ManifestName)
	// ErrChanged reports files that are not those of the manifest. It is an
	// images.ErrDamaged.
	ErrChanged = fmt.Errorf("%w: it is not what was signed", images.ErrDamaged)
)

// Manifest is a list of a checkpoint's files, by name.
type Manifest struct {
	Version int    `json:"manifestVersion"`
	Files   []File `json:"files"`
}

// File is what a manifest says of a file.
type File struct {
	Name  string `json:"name"`
	Bytes uint64 `json:"bytes"`
	// Digests are those of the file's blocks of images.BlockBytes, by images.DigestBlock;
	// an empty file has none.
	Digests []string `json:"digests"`
}

// signatureForm matches the names of signatures.
var signatureForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^gpuckpt\.manifest(\.[0-9A-Za-z_-]{1,64})?\.sig$`) })

// descriptions are files that the kubelet's archives have beside a dump. No restore reads
// them: who signed the dump has not seen them, so a manifest may lack them.
var descriptions = []string{
	"config.dump", "spec.dump", "status.dump", "network.status", "status", "dump.log", "stats-dump", "container.log", "io.kubernetes.cri-o.LogPath",
}

// Describes reports whether a file of a name only describes a checkpoint: a manifest may lack it.
func Describes(name string) bool { return slices.Contains(descriptions, name) }

// listed reports whether a manifest lists files of a name: not itself, nor signatures, and
// not the pieces of GPU state.
func listed(name string) bool {
	return !IsSeal(name) && !images.IsAreaFile(name)
}

// Make reads a checkpoint's files and returns their manifest. It reads as many blocks at a
// time as there are processors. The files of GPU state need not be among them.
func Make(ctx context.Context, files []images.File) (*Manifest, error) {
	m := list(files)
	if err := m.digest(ctx, files); err != nil {
		return nil, err
	}
	return m, m.validate()
}

// list returns a manifest with the names and sizes of files. Nobody has compared these sizes.
func list(files []images.File) *Manifest {
	m := &Manifest{Version: version, Files: []File{}}
	for _, f := range files {
		if listed(f.Name) {
			m.Files = append(m.Files, File{Name: f.Name, Bytes: f.Bytes})
		}
	}
	slices.SortFunc(m.Files, byName)
	return m
}

// digest fills in the digests of all blocks, from the files of the manifest's names.
func (m *Manifest) digest(ctx context.Context, files []images.File) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.NumCPU())
	large := 0 // blocks that take time
	for i, f := range m.Files {
		large += int((f.Bytes + images.BlockBytes/2) / images.BlockBytes)
		if f.Digests == nil {
			m.Files[i].Digests = make([]string, images.Blocks(f.Bytes))
		}
	}
	threads := runtime.NumCPU() / max(large, 1)
	for _, f := range files {
		at, found := m.find(f.Name)
		if !found {
			continue
		}
		digests := m.Files[at].Digests
		for i := range digests {
			if digests[i] != "" {
				continue // it is known
			}
			group.Go(func() (err error) {
				digests[i], err = digestBlock(ctx, f, i, threads)
				return err
			})
		}
	}
	return group.Wait()
}

// digestBlock reads one block of a file, on so many threads.
func digestBlock(ctx context.Context, f images.File, number, threads int) (string, error) {
	r, err := f.Reader(ctx)
	if err != nil {
		return "", fmt.Errorf("read the checkpoint: %w", err)
	}
	defer r.Close()
	from := uint64(number) * images.BlockBytes
	return images.DigestRead(min(images.BlockBytes, f.Bytes-from), threads, func(p []byte, at uint64) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		_, err := r.ReadAt(p, int64(from+at))
		if errors.Is(err, io.EOF) {
			err = ErrChanged
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", f.Path, err)
		}
		return nil
	})
}

// find returns the index of a file.
func (m *Manifest) find(name string) (int, bool) {
	return slices.BinarySearchFunc(m.Files, name, func(f File, name string) int { return strings.Compare(f.Name, name) })
}

// Check refuses files that are not the manifest's: one that is missing, that is not
// listed, or that has other bytes. It reads nothing of files whose names and sizes are not
// right. The error is ErrChanged and names the first of them. Of GPU state it reads
// nothing: gpuckpt.json has its digests.
func (m *Manifest) Check(ctx context.Context, files []images.File) error {
	_, err := m.CheckNow(ctx, files, func(images.File) bool { return false })
	return err
}

// compare compares what the files are with what they should be.
func (m *Manifest) compare(actual []File, digests bool) error {
	have := make(map[string]bool, len(actual))
	for _, f := range actual {
		at, found := m.find(f.Name)
		switch {
		case have[f.Name]:
			return fmt.Errorf("%w: there are two files %s", ErrChanged, f.Name)
		case !found && Describes(f.Name):
		case !found:
			return fmt.Errorf("%w: %s is not in %s", ErrChanged, f.Name, ManifestName)
		case f.Bytes != m.Files[at].Bytes:
			return fmt.Errorf("%w: %s has %d bytes, not %d", ErrChanged, f.Name, f.Bytes, m.Files[at].Bytes)
		case digests && !slices.Equal(f.Digests, m.Files[at].Digests):
			return fmt.Errorf("%w: %s has other bytes", ErrChanged, f.Name)
		}
		have[f.Name] = true
	}
	for _, f := range m.Files {
		if !have[f.Name] {
			return fmt.Errorf("%w: %s is missing", ErrChanged, f.Name)
		}
	}
	return nil
}

func byName(a, b File) int { return strings.Compare(a.Name, b.Name) }

// Encode returns the bytes of the manifest.
func (m *Manifest) Encode() ([]byte, error) {
	if err := m.validate(); err != nil {
		return nil, err
	}
	data, err := json.MarshalIndent(m, "", " ")
	if err == nil && len(data) >= maxManifest {
		err = fmt.Errorf("the manifest has %d bytes, more than %d", len(data), maxManifest)
	}
	return append(data, '\n'), err
}

// Parse decodes a manifest. It accepts what Encode returns and nothing else: there is one
// form of each manifest. The error is ErrMalformed.
func Parse(data []byte) (*Manifest, error) {
	m := new(Manifest)
	if len(data) > maxManifest {
		return nil, fmt.Errorf("%w: larger than %d bytes", ErrMalformed, maxManifest)
	}
	if err := json.Unmarshal(data, m); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	same, err := m.Encode()
	if err == nil && !bytes.Equal(same, data) {
		err = errors.New("it is not in the form that gpuckpt writes")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return m, nil
}

// digestForm matches the digest of a block.
var digestForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^blake3:[0-9a-f]{64}$`) })

func (m *Manifest) validate() error {
	if m.Version != version {
		return fmt.Errorf("manifestVersion is %d: this gpuckpt knows %d", m.Version, version)
	}
	if m.Files == nil {
		return errors.New("it lists no files")
	}
	for i, f := range m.Files {
		switch {
		case f.Name == "" || f.Name == "." || f.Name == ".." || strings.ContainsAny(f.Name, "/\x00") || !listed(f.Name):
			return fmt.Errorf("%q is not the name of a file that it may list", f.Name)
		case i > 0 && m.Files[i-1].Name >= f.Name:
			return fmt.Errorf("%q is not in order", f.Name)
		case uint64(len(f.Digests)) != images.Blocks(f.Bytes) || f.Digests == nil:
			return fmt.Errorf("%s has %d digests for %d bytes", f.Name, len(f.Digests), f.Bytes)
		}
		for _, d := range f.Digests {
			if !digestForm().MatchString(d) {
				return fmt.Errorf("%s: %q is not a digest", f.Name, d)
			}
		}
	}
	return nil
}

// Digest returns the digest of a manifest's bytes, by which [restore] images knows a
// checkpoint.
func Digest(manifest []byte) string {
	return fmt.Sprintf("sha256:%x", sha256.Sum256(manifest))
}
