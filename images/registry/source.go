// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"github.com/gpuckpt/gpuckpt/images/localstore"
)

// ErrWrongBytes reports other bytes than those of the digest.
var ErrWrongBytes = errors.New("other bytes came than those of the digest")

// Source is an image in a registry whose blobs are fetched one by one. It counts them as a Pull
// does. Its ReaderAt is for small documents.
type Source struct {
	documents
	*transfer
	// Ref is the image's name, and Image the manifest, or index, that it had.
	Ref   string
	Image ocispec.Descriptor

	slots *semaphore.Weighted
}

// Open finds an image in a registry. step is what its progress is called.
func Open(ctx context.Context, ref, step string, options Options) (_ *Source, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("look up %s: %w", ref, explain(err, ref))
		}
	}()
	if err := localstore.CheckName(ref); err != nil {
		return nil, err
	}
	o := options.defaults()
	s := newSource(ref, step, o)
	err = s.attempts(ctx, nil, func() (err error) {
		resolver := newResolver(ctx, o)
		var name string
		if name, s.Image, err = resolver.Resolve(ctx, ref); err != nil {
			return err
		}
		fetcher, err := resolver.Fetcher(ctx, name)
		s.documents.fetcher = remotes.FetcherFunc(func(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
			d.URLs = nil // which a client of the library's own would ask first, wherever they lead
			return fetcher.Fetch(ctx, d)
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

func newSource(ref, step string, o Options) *Source {
	return &Source{transfer: newTransfer(step, o), Ref: ref, slots: semaphore.NewWeighted(int64(o.Parallel))}
}

// Store fetches a blob into a content store. containerd's own keeps the part that an interrupted fetch
// has brought, and the next one goes on there. A localstore.Store begins anew.
func (s *Source) Store(ctx context.Context, store content.Store, d ocispec.Descriptor) error {
	s.know(d)
	err := s.attempts(ctx, s.meter, func() error {
		switch err := remotes.Fetch(ctx, store, remotes.FetcherFunc(s.Stream), d); {
		case err == nil || errdefs.IsAlreadyExists(err):
			s.reach(d.Digest, d.Size, 0)
			return nil
		case errdefs.IsFailedPrecondition(err):
			// Other bytes than those of the digest: the store would go on behind them.
			_ = store.Abort(ctx, remotes.MakeRefKey(ctx, d))
			return fmt.Errorf("%w: %v", ErrWrongBytes, err) //nolint:errorlint // it is tried again
		default:
			return err
		}
	})
	if err != nil {
		return fmt.Errorf("fetch %s: %w", d.Digest, explain(err, s.Ref))
	}
	return nil
}

// Copy fetches the bytes of a blob, no more than it has, and compares them with nothing. No byte is written twice. told
// is called with how many are there, every few MiB. The error names the blob, and w has what came before it.
func (s *Source) Copy(ctx context.Context, w io.Writer, d ocispec.Descriptor, told func(bytes uint64)) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("fetch %s: %w", d.Digest, explain(err, s.Ref))
		}
	}()
	data, err := s.Stream(ctx, d)
	if err != nil {
		return err
	}
	defer data.Close()
	buf := make([]byte, 1<<20)
	for at := int64(0); at < d.Size; {
		n, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{io.LimitReader(data, min(partBytes, d.Size-at))}, buf)
		if err != nil {
			return err
		}
		at += n
		told(uint64(at))
	}
	return nil
}

// partBytes is how often who waits for a blob is told how much of it is there.
const partBytes = 4 << 20

// Note passes on a line for the user.
func (s *Source) Note(text string) { s.meter.Note(text) }

// Stream reads a blob, once it is its turn, until Close. Where the connection breaks or says nothing
// for Options.Stall, it goes on by a request for the rest, as often as Options.Attempts in a row
// without a byte between. Nothing is compared with the digest. The reader can seek before it is read.
func (s *Source) Stream(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	s.know(d)
	if err := s.slots.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	return &stream{s: s, ctx: ctx, of: d}, nil
}

// End ends the step of the progress.
func (s *Source) End(result string) *Result {
	s.meter.End(result)
	return s.result()
}

// errSilent is why a connection was cut.
var errSilent = errors.New("the registry sent nothing for too long")

// stream is a blob on its way by one connection after another.
type stream struct {
	s      *Source
	ctx    context.Context // of all connections
	of     ocispec.Descriptor
	at     int64
	data   io.ReadCloser   // nil: there is no connection
	link   context.Context // of the connection, until cut is called
	cut    context.CancelCauseFunc
	silent *time.Timer
	closed bool
}

// Read reads on, by a new connection if need be.
func (r *stream) Read(p []byte) (n int, err error) {
	if r.closed {
		return 0, errors.New("read a blob that is closed")
	}
	ended := false
	err = r.s.attempts(r.ctx, r.s.meter, func() error {
		var err error
		n, err = r.read(p)
		if ended = errors.Is(err, io.EOF) && r.at == r.of.Size; ended || n > 0 {
			return nil
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return err
	})
	if err == nil && n == 0 && ended {
		err = io.EOF
	}
	if err != nil && !errors.Is(err, io.EOF) && r.ctx.Err() == nil {
		err = finalError{err} // it was tried again here
	}
	return n, err
}

// read reads by the connection that is there, or a new one. After an error there is none.
func (r *stream) read(p []byte) (int, error) {
	if r.data == nil {
		if err := r.connect(); err != nil {
			return 0, err
		}
	}
	r.silent.Reset(r.s.Stall)
	n, err := r.data.Read(p)
	r.silent.Stop()
	r.at += int64(n)
	r.s.reach(r.of.Digest, r.at, int64(n))
	if r.at > r.of.Size {
		return n, fmt.Errorf("the registry sent more than %d bytes: %w", r.of.Size, errdefs.ErrFailedPrecondition)
	}
	if err != nil && (n == 0 || !errors.Is(err, io.EOF)) {
		err = r.disconnect(err)
	}
	return n, err
}

func (r *stream) connect() error {
	ctx, cut := context.WithCancelCause(r.ctx)
	data, err := r.s.fetcher.Fetch(ctx, r.of)
	if err != nil {
		cut(err)
		return err
	}
	if r.at > 0 {
		from, ok := data.(io.Seeker)
		if !ok {
			err = errors.New("the registry cannot go on in the middle of a blob")
		} else {
			_, err = from.Seek(r.at, io.SeekStart)
		}
	}
	if err != nil {
		cut(err)
		return errors.Join(err, data.Close())
	}
	r.data, r.link, r.cut = data, ctx, cut
	r.silent = time.AfterFunc(r.s.Stall, func() { cut(errSilent) })
	return nil
}

// disconnect ends the connection, and returns the cause of err.
func (r *stream) disconnect(err error) error {
	if r.data == nil {
		return err
	}
	r.silent.Stop()
	if cause := context.Cause(r.link); errors.Is(cause, errSilent) {
		err = fmt.Errorf("%w (%v)", cause, r.s.Stall)
	}
	r.cut(err)
	r.data.Close()
	r.data = nil
	return err
}

// Seek goes to an offset, as the other side has got there.
func (r *stream) Seek(offset int64, whence int) (int64, error) {
	if whence != io.SeekStart || offset < 0 || offset > r.of.Size {
		return r.at, fmt.Errorf("seek to %d in a blob of %d bytes: %w", offset, r.of.Size, errdefs.ErrInvalidArgument)
	}
	if offset != r.at {
		_ = r.disconnect(nil)
		r.at = offset
		r.s.reach(r.of.Digest, offset, 0)
	}
	return offset, nil
}

// Close ends the stream.
func (r *stream) Close() error {
	if !r.closed {
		r.closed = true
		_ = r.disconnect(nil)
		r.s.slots.Release(1)
	}
	return nil
}
