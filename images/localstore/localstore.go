// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package localstore works with the images of a containerd on this machine: it finds, names and
// unpacks them, and reads and writes large blobs of its content store past its socket, which carries
// little more than 1 GB/s per connection.
//
// A blob is written to a file without a name on the store's file system, hashed on the way or, if
// others read it meanwhile, when it is complete, and linked to the place of its digest. containerd is then asked to write a blob of that digest: with
// the sharing policy "shared" it finds the bytes and enters them for the namespace, with the lease
// of the request, as if another namespace had pulled them.
//
// The life of a blob: Writer, Write, Commit. A process that is killed before the link leaves
// nothing. After the link the blob is complete, and containerd's garbage collector removes one that
// it was never asked for. If it was faster than the question, the bytes go through the socket.
package localstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// Store is containerd's content store. Blobs are read in its directory, and go there; all else is containerd's answer.
type Store struct {
	content.Store
	blobs string   // the directory of the blobs with digests of digest.Canonical
	wrote sync.Map // the digests of the blobs that were written here
}

// Open returns the store whose directory is root, the export "root" of containerd's content plugin,
// whose sharing policy must be "shared". known is a blob of containerd's: a directory without it
// belongs to another. After an error containerd's own store is there, which is slower.
func Open(store content.Store, root string, known ocispec.Descriptor) (*Store, error) {
	if known.Digest == "" {
		return nil, errors.New("no blob is known by which to tell containerd's content store")
	}
	if known.Digest.Algorithm() != digest.Canonical {
		return nil, fmt.Errorf("%s is not a %s digest", known.Digest, digest.Canonical)
	}
	s := &Store{Store: store, blobs: filepath.Join(root, "blobs", digest.Canonical.String())}
	info, err := os.Lstat(filepath.Join(s.blobs, known.Digest.Encoded()))
	if err != nil {
		return nil, fmt.Errorf("look into containerd's content store: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() != known.Size {
		return nil, fmt.Errorf("%s in %s is not what containerd has", known.Digest, s.blobs)
	}
	f, err := s.temporary()
	if err != nil {
		return nil, err
	}
	return s, f.Close()
}

// temporary makes a file that has no name yet.
func (s *Store) temporary() (*os.File, error) {
	fd, err := unix.Open(s.blobs, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return nil, fmt.Errorf("make a file in containerd's content store: %w", &os.PathError{Op: "open", Path: s.blobs, Err: err})
	}
	return os.NewFile(uintptr(fd), s.blobs), nil
}

// ReaderAt reads a blob that containerd has for the namespace.
func (s *Store) ReaderAt(ctx context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	info, err := s.Info(ctx, d.Digest)
	if err != nil {
		return nil, err
	}
	if d.Digest.Algorithm() != digest.Canonical {
		return s.Store.ReaderAt(ctx, d)
	}
	f, err := os.Open(filepath.Join(s.blobs, d.Digest.Encoded()))
	if err != nil {
		return s.Store.ReaderAt(ctx, d)
	}
	return &blob{f, info.Size}, nil
}

// blob is a file with a blob.
type blob struct {
	*os.File
	size int64
}

// Size is that of the blob in bytes.
func (b *blob) Size() int64 { return b.size }

// Writer begins a blob. One that the namespace has is containerd's answer, which keeps it for the lease.
func (s *Store) Writer(ctx context.Context, opts ...content.WriterOpt) (content.Writer, error) {
	var o content.WriterOpts
	for _, opt := range opts {
		if err := opt(&o); err != nil {
			return nil, err
		}
	}
	if d := o.Desc.Digest; d != "" {
		if _, err := s.Info(ctx, d); !errdefs.IsNotFound(err) || d.Validate() != nil || d.Algorithm() != digest.Canonical {
			return s.Store.Writer(ctx, opts...)
		}
	}
	f, err := s.temporary()
	if err != nil {
		return nil, err
	}
	return &writer{ctx: ctx, store: s, ref: o.Ref, total: o.Desc.Size, file: f, to: mmapfile.NewWriter(f, 0), digester: digest.Canonical.Digester()}, nil
}

// Early begins a blob that others read, as d.Encoded in a directory on the store's file system, before it is
// complete: the file has its full size from the begin. Nothing of it is written twice, and it is digested when it is
// complete.
func (s *Store) Early(ctx context.Context, d ocispec.Descriptor, dir string) (content.Writer, error) {
	f, err := s.temporary()
	if err != nil {
		return nil, err
	}
	if err = f.Truncate(d.Size); err == nil {
		err = link(f, unix.AT_FDCWD, filepath.Join(dir, d.Digest.Encoded()))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &writer{
		ctx: ctx, store: s, ref: "gpuckpt-early-" + d.Digest.String(), total: d.Size, file: f, to: mmapfile.NewWriter(f, d.Size),
	}, nil
}

// Link links a blob into a directory on the store's file system, as d.Digest.Encoded. The error is errdefs.ErrNotFound if
// containerd does not have it for the namespace.
func (s *Store) Link(ctx context.Context, d ocispec.Descriptor, dir string) error {
	info, err := s.Info(ctx, d.Digest)
	if err != nil {
		return err
	}
	if info.Size != d.Size {
		return fmt.Errorf("blob %s has %d bytes, not %d: %w", d.Digest, info.Size, d.Size, errdefs.ErrFailedPrecondition)
	}
	return os.Link(filepath.Join(s.blobs, d.Digest.Encoded()), filepath.Join(dir, d.Digest.Encoded()))
}

// Beside makes a directory on the store's file system, and returns its path: nobody but root can enter it.
func (s *Store) Beside(name ...string) (string, error) {
	dir := filepath.Join(append([]string{filepath.Dir(filepath.Dir(s.blobs))}, name...)...)
	return dir, os.MkdirAll(dir, 0o700)
}

// writer is a blob that has no name yet.
type writer struct {
	ctx      context.Context // of the Writer call, with its namespace and lease
	store    *Store
	ref      string
	total    int64
	file     *os.File
	to       *mmapfile.Writer // writes the file
	digester digest.Digester  // nil for one of Early
	size     int64
}

// Write appends to the blob.
func (w *writer) Write(p []byte) (int, error) {
	n, err := w.to.Write(p)
	if w.digester != nil {
		w.digester.Hash().Write(p[:n])
	}
	w.size += int64(n)
	return n, err
}

// Digest is that of what was written so far; "" for a blob of Early.
func (w *writer) Digest() digest.Digest {
	if w.digester == nil {
		return ""
	}
	return w.digester.Digest()
}

// Status returns how far the blob is.
func (w *writer) Status() (content.Status, error) {
	return content.Status{Ref: w.ref, Offset: w.size, Total: w.total}, nil
}

// Truncate is of content.Writer, and nobody's need: another writer begins anew.
func (w *writer) Truncate(int64) error {
	return fmt.Errorf("cut a blob of %d bytes: %w", w.size, errdefs.ErrFailedPrecondition)
}

// Close discards what was not committed.
func (w *writer) Close() error {
	err := errors.Join(w.to.Close(), w.file.Close())
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// Commit makes the blob one of containerd's and closes the writer. After an error the garbage
// collector removes what may be there. ErrAlreadyExists says that the namespace has the blob.
func (w *writer) Commit(ctx context.Context, size int64, expected digest.Digest, opts ...content.Opt) error {
	defer w.Close()
	if size > 0 && size != w.size {
		return fmt.Errorf("unexpected commit size %d, expected %d: %w", w.size, size, errdefs.ErrFailedPrecondition)
	}
	d := w.Digest()
	if d == "" {
		var err error
		if d, err = digest.FromReader(io.NewSectionReader(w.file, 0, w.size)); err != nil {
			return fmt.Errorf("read the blob %s again: %w", expected, err)
		}
	}
	if expected != "" && expected != d {
		return fmt.Errorf("unexpected commit digest %s, expected %s: %w", d, expected, errdefs.ErrFailedPrecondition)
	}
	err := w.place(d)
	if errors.Is(err, os.ErrClosed) {
		err = fmt.Errorf("%w: %w", errdefs.ErrFailedPrecondition, err)
	}
	if err != nil {
		return fmt.Errorf("put %s into containerd's content store: %w", d, err)
	}
	//nolint:contextcheck // the writer's own, with the namespace and the lease it was opened in
	remote, err := w.store.Store.Writer(w.ctx, content.WithRef(w.ref), content.WithDescriptor(ocispec.Descriptor{Digest: d, Size: w.size}))
	if err != nil {
		return err // ErrAlreadyExists among them
	}
	defer remote.Close()
	status, err := remote.Status()
	if err != nil {
		return err
	}
	if status.Offset == w.size {
		return remote.Commit(ctx, w.size, d, opts...)
	}
	// containerd does not see the blob: the collector was here in between.
	return content.Copy(ctx, remote, io.NewSectionReader(w.file, 0, w.size), w.size, d, opts...)
}

// place gives the file the name of its digest, as safely as containerd does. It replaces another namespace's, which
// may be damaged.
func (w *writer) place(d digest.Digest) error {
	if err := errors.Join(w.to.Close(), w.file.Sync()); err != nil {
		return err
	}
	dir, err := os.Open(w.store.blobs)
	if err != nil {
		return err
	}
	defer dir.Close()
	err = link(w.file, int(dir.Fd()), d.Encoded())
	if errors.Is(err, unix.EEXIST) {
		beside := filepath.Join(filepath.Dir(filepath.Dir(w.store.blobs)), "gpuckpt-"+rand.Text())
		if err = link(w.file, unix.AT_FDCWD, beside); err == nil {
			if err = os.Rename(beside, filepath.Join(w.store.blobs, d.Encoded())); err != nil {
				err = errors.Join(err, os.Remove(beside))
			}
		}
	}
	if err != nil {
		return err
	}
	w.store.wrote.Store(d, true)
	return dir.Sync()
}

// link links an open file into a directory; see open(2), O_TMPFILE.
func link(f *os.File, dir int, name string) error {
	self := "/proc/self/fd/" + strconv.Itoa(int(f.Fd()))
	if err := unix.Linkat(unix.AT_FDCWD, self, dir, name, unix.AT_SYMLINK_FOLLOW); err != nil {
		return &os.LinkError{Op: "link", Old: self, New: name, Err: err}
	}
	return nil
}
