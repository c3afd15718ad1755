// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package trust decides whose checkpoints a node restores, and signs the node's own.
//
// The node's key is made when it is first needed. Sealer reads it before a checkpoint
// begins, and its Seal signs the checkpoint as the last thing before it is complete. Admit
// is the first that looks at a checkpoint in a restore: before it has returned, nobody has
// parsed any byte of it. A Rest compares the memory of processes, which nobody parses, meanwhile and
// before a program runs. See docs/security.md.
package trust

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/feed"
	"github.com/gpuckpt/gpuckpt/images/sign"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Sealer signs checkpoints with the node's key.
type Sealer struct {
	signer *sign.Signer // nil: the node signs nothing
	began  time.Time
}

// NewSealer reads the node's key, or makes it if there is none. The checkpoint begins now. dir is
// where it will be; it need not be there. One in which others could exchange files is refused: they
// could have files of theirs signed.
func NewSealer(read config.Source, dir string) (*Sealer, error) {
	began := time.Now().UTC()
	view, err := read()
	if err != nil || view.Signing.Key == "" {
		return &Sealer{began: began}, err
	}
	signer, err := sign.ReadOrMakeSigner(view.Signing.Key)
	if err != nil {
		return nil, fmt.Errorf("the key that signs this node's checkpoints: %w ([signing] key in %s; \"\" signs nothing): %w", err, config.Path, errdefs.ErrFailedPrecondition)
	}
	return &Sealer{signer, began}, own(dir)
}

// own refuses what others can exchange or write to. In a directory with the sticky bit, as the root of a tmpfs, they can
// add files: sign.Write refuses those.
func own(path string) error {
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at the directory for the images: %w", err)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); !ok || int(sys.Uid) != os.Geteuid() || st.Mode().Perm()&0o022 != 0 && (!st.IsDir() || st.Mode()&os.ModeSticky == 0) {
		return fmt.Errorf("others than root can write to %s, and exchange what is signed: choose a directory of root's own, with files of root's, mode 0755 or less: %w", path, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// Complete signs the checkpoint in a directory and writes its gpuckpt.json, which makes it
// complete. known are digests of files of it, see sign.Write. Without processes there is no GPU
// state: CRIU's images are all. On an error it is not complete.
func (s *Sealer) Complete(ctx context.Context, dir string, m *images.Metadata, known map[string][]string) error {
	if len(m.Processes) == 0 {
		m = &images.Metadata{SchemaVersion: images.SchemaVersion, Created: s.began}
	}
	return images.WriteMetadata(dir, m, func(encoded []byte) error {
		if s.signer == nil {
			return nil
		}
		defer host.AllProcessors()()
		return sign.Write(ctx, dir, s.signer, map[string][]byte{images.MetadataName: encoded}, known)
	})
}

// OpenImage opens the checkpoint of an unpacked image, as images.OpenImage does, unless the node's
// policy does not let it in. dirs is what images.ImageDirs returned of roots. A container of the
// image that is to start from the beginning gets no checkpoint, and the reason. For rest see Rest. Blobs may still
// arrive: the source, nil if all is here, is to be closed after the restore.
func OpenImage(ctx context.Context, read config.Source, blobs string, dirs, roots []string, rest *Rest) (_ *images.Checkpoint, _ *feed.Source, afresh string, err error) {
	view, err := read()
	if err != nil {
		return nil, nil, "", err
	}
	if afresh, err = view.StartsAfresh(); err != nil || afresh != "" {
		return nil, nil, afresh, err
	}
	var source *feed.Source
	if len(roots) > 1 { // a directory for each layer; beside another one is what others have put there
		if source, err = feed.Beside(dirs); err != nil { // before anything is read: it goes when all is here
			return nil, nil, "", err
		}
	}
	defer func() {
		if err != nil {
			source.Close()
		}
	}()
	var found *images.Checkpoint
	err = admit(ctx, read, true, dirs, rest, func() (_ []images.File, err error) {
		if found, err = images.ListImage(blobs, dirs...); err != nil && source != nil {
			if found, err = images.ListImage(source.Blobs, dirs...); err == nil {
				source.Set(found)
			}
		} else { // containerd may have all by another pull
			source.Close()
			source = nil
		}
		if err != nil {
			return nil, err
		}
		return found.Files, nil
	})
	if err == nil {
		err = found.Complete()
	}
	if err != nil {
		return nil, nil, "", err
	}
	if source != nil {
		source.Set(found)
		if found.Metadata != nil && !found.Metadata.ProvesGPUState() { // nor does SHA-256, before it is read
			err = fmt.Errorf("%s is still arriving, and %w: pull it before it is restored: %w", dirs[0], errOldDigests, errdefs.ErrFailedPrecondition)
			return nil, nil, "", err
		}
	}
	return found, source, "", nil
}

// Admit refuses a checkpoint that the client names and that the node's policy does not let
// in. Its files are read again after they are compared: those that others can exchange are refused. For rest see Rest.
func Admit(ctx context.Context, read config.Source, dir string, rest *Rest) error {
	return admit(ctx, read, false, []string{dir}, rest, func() ([]images.File, error) {
		files, err := images.ListDirs(dir)
		if err == nil {
			err = own(dir)
		}
		for _, f := range files {
			err = cmp.Or(err, own(f.Path))
		}
		return files, err
	})
}

// admit compares the files, which list returns, if the policy wants it or if some are in pieces. The blob of a piece may be
// anybody's.
func admit(ctx context.Context, read config.Source, image bool, dirs []string, rest *Rest, list func() ([]images.File, error)) error {
	s, entry, err := vet(ctx, read, image, dirs)
	if err != nil || s == nil && !image {
		return err
	}
	files, err := list()
	if err != nil {
		return err
	}
	if s == nil {
		pieces := slices.ContainsFunc(files, func(f images.File) bool { return f.Pieces != nil })
		if !pieces {
			return nil
		}
		if s, err = sign.Read(files); s == nil {
			return fmt.Errorf("%w: it has memory in pieces, and: %w", images.ErrDamaged, err)
		}
	}
	m, err := sign.Parse(s.Manifest)
	if err != nil {
		return err
	}
	began, back := time.Now(), host.AllProcessors()
	later, err := m.CheckNow(ctx, files, rest.takes)
	back()
	if err != nil {
		return err
	}
	meta, err := images.ReadMetadata(dirs[0])
	switch {
	case err == nil && !meta.ProvesGPUState():
		return refused(dirs[0], errOldDigests)
	case err != nil && !errors.Is(err, images.ErrNoMetadata):
		return err
	}
	right := func() { entry.WithField("took", time.Since(began)).Info("the checkpoint is what its manifest says") }
	if later == nil {
		right()
		return nil
	}
	rest.begin(later, right)
	return nil
}

// vet returns the seal with which the node's policy has the files compared, because a trusted key has signed it or the node
// lists its digest. It returns nil for files that the policy lets in as they are, and refuses others.
func vet(ctx context.Context, read config.Source, image bool, dirs []string) (*sign.Seal, *log.Entry, error) {
	view, err := read()
	if err != nil {
		return nil, nil, err
	}
	entry := log.G(ctx)
	signed := view.Restore.NeedsSignature()
	listed := image && view.Restore.ListsDigests() // then the manifest counts, signed or not
	if !signed && !listed {
		if image {
			err = view.AllowsImage("")
		}
		return nil, entry, err
	}
	files, err := images.ListDirs(dirs...)
	if err != nil {
		return nil, nil, err
	}
	s, err := sign.Read(files)
	switch {
	case err != nil && (signed || !errors.Is(err, sign.ErrUnsigned)):
		return nil, nil, refused(dirs[0], err)
	case s == nil:
		return nil, entry, view.AllowsImage("")
	}
	if signed {
		keys, err := Keys(view.Node)
		if err != nil {
			return nil, nil, err
		}
		key, err := s.SignedBy(keys)
		if err != nil {
			return nil, nil, refused(dirs[0], fmt.Errorf("%w: it has %s; %s", err, strings.Join(s.Names(), ", "), words(keys)))
		}
		entry = entry.WithField("key", key.Name)
	}
	if image {
		err = view.AllowsImage(sign.Digest(s.Manifest))
	}
	return s, entry, err
}

// errOldDigests refuses a checkpoint whose signature does not cover its GPU state.
var errOldDigests = errors.New("its GPU state has digests that prove nothing (schema version 1)")

// refused says what can be done about a checkpoint that no key has signed.
func refused(dir string, err error) error {
	return fmt.Errorf("%s: %w; if you trust it like root on this node, sign it (gpuckpt image sign), or trust the key of the node that made it ([restore] keys in %s): %w",
		dir, err, config.Path, errdefs.ErrFailedPrecondition)
}

// words names keys for a person.
func words(keys []sign.Key) string {
	if len(keys) == 0 {
		return "no key is trusted here"
	}
	var names []string
	for _, k := range keys {
		names = append(names, k.ID()+" of "+k.Name)
	}
	slices.Sort(names)
	return "the trusted keys are " + strings.Join(slices.Compact(names), ", ")
}

// Keys returns the keys that a node trusts: the node's own, if it is there,
// and those of [restore] keys.
func Keys(node config.Node) ([]sign.Key, error) {
	keys, err := sign.ReadKeys(node.Restore.Keys...)
	if err != nil {
		return nil, fmt.Errorf("[restore] keys in %s: %w: %w", config.Path, err, errdefs.ErrFailedPrecondition)
	}
	if node.Signing.Key == "" {
		return keys, nil
	}
	own, err := sign.ReadSigner(node.Signing.Key)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return keys, nil
	case err != nil:
		return nil, fmt.Errorf("[signing] key in %s: %w: %w", config.Path, err, errdefs.ErrFailedPrecondition)
	}
	return append([]sign.Key{own.Key}, keys...), nil
}
