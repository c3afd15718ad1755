// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package feed has one process restore a checkpoint whose memory and GPU state another process still writes.
//
// The writer makes every file at its full size, and a Feed that it tells how much of a file is there
// and does not change any more (Have), or that no more comes (Fail).
// Once the reader can begin, the Feed serves at a socket in a directory. The reader opens the Source of that directory, which is told of all this,
// and sets it as the images.Arrival of the files. Nothing that the writer says is believed: the reader
// compares digests as ever. If the writer ends too early, whoever waits gets an error.
package feed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// socketName is the name of the socket in the directory of a feed.
const socketName = "gpuckpt-arriving.sock"

// ErrEnded reports that the program that fetches a checkpoint ended before all of it was there.
var ErrEnded = errors.New("the program that fetches the checkpoint has ended")

// note is one message of a Feed.
type note struct {
	// Blobs is the first note: the directory of the blobs, as images.OpenImage wants it.
	Blobs string `json:"blobs,omitempty"`
	// Have is the path of a file whose first Bytes are there.
	Have  string `json:"have,omitempty"`
	Bytes uint64 `json:"bytes,omitempty"`
	// Failed is why no more will arrive.
	Failed string `json:"failed,omitempty"`
}

// Feed tells any number of Sources which files have arrived. It is told from New on, and a Source hears all
// of it, also what was told before there was a Source, or a Serve.
type Feed struct {
	mu    sync.Mutex
	notes []note
	more  chan struct{} // closed, and replaced, when there is another note
	over  bool          // see Close

	path     string
	listener *net.UnixListener // nil while it does not serve
	sources  []*net.UnixConn   // that it has had meanwhile
	serving  sync.WaitGroup
}

// New makes a feed that serves nobody yet.
func New() *Feed { return &Feed{more: make(chan struct{})} }

// Serve serves in a directory that only root can enter, until Close. blobs is that of images.OpenImage.
// A socket that a killed program has left there is replaced.
func (f *Feed) Serve(dir, blobs string) error {
	path := filepath.Join(dir, socketName)
	var listener *net.UnixListener
	err := os.Remove(path)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = short(dir, func(address *net.UnixAddr) (err error) {
			if listener, err = net.ListenUnix("unix", address); err == nil {
				listener.SetUnlinkOnClose(false) // its name is of this moment alone
			}
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("tell of what arrives: %w", err)
	}
	f.mu.Lock()
	f.path, f.listener = path, listener
	f.mu.Unlock()
	f.serving.Go(func() { f.serve(listener, blobs) })
	return nil
}

// short calls do with an address, short enough for a socket's, of a new socket in a directory.
func short(dir string, do func(*net.UnixAddr) error) error {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	return do(&net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", fd, socketName)})
}

func (f *Feed) serve(listener *net.UnixListener, blobs string) {
	for {
		c, err := listener.AcceptUnix()
		if err != nil {
			return // it is closed
		}
		f.mu.Lock()
		f.sources = append(f.sources, c)
		if f.over { // Close has looked already
			_ = c.SetDeadline(time.Now().Add(closeWithin))
		}
		f.mu.Unlock()
		f.serving.Go(func() {
			defer c.Close()
			f.send(c, blobs)
			// Until it hangs up: it may open the files that it was told of until then.
			if c.CloseWrite() == nil {
				_, _ = io.Copy(io.Discard, c)
			}
		})
	}
}

// send sends all notes to a Source until the last, or until it has gone.
func (f *Feed) send(c *net.UnixConn, blobs string) {
	out := json.NewEncoder(c)
	if out.Encode(note{Blobs: blobs}) != nil {
		return
	}
	for at := 0; ; {
		f.mu.Lock()
		notes, more, over := f.notes[at:], f.more, f.over
		f.mu.Unlock()
		for _, n := range notes {
			if out.Encode(n) != nil || n.Failed != "" {
				return
			}
		}
		if at += len(notes); over {
			return
		}
		if len(notes) == 0 {
			<-more
		}
	}
}

func (f *Feed) tell(n ...note) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.notes = append(f.notes, n...)
	close(f.more)
	f.more = make(chan struct{})
}

// Have tells how many bytes of a file are there, from its begin on.
func (f *Feed) Have(path string, bytes uint64) { f.tell(note{Have: path, Bytes: bytes}) }

// Fail tells that no more will arrive.
func (f *Feed) Fail(err error) { f.tell(note{Failed: err.Error()}) }

// closeWithin bounds the end of a Close where a Source does not read, or not hang up.
const closeWithin = 10 * time.Second

// Close ends the Serve, if there was one, and removes its socket, and waits until the Sources are closed. It can be
// called again.
func (f *Feed) Close() error {
	f.mu.Lock()
	listener, path := f.listener, f.path
	f.listener, f.over = nil, true
	for _, c := range f.sources {
		_ = c.SetDeadline(time.Now().Add(closeWithin)) // or it has gone
	}
	f.sources = nil
	f.mu.Unlock()
	if listener == nil {
		return nil
	}
	f.tell()
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	err = errors.Join(err, listener.Close())
	f.serving.Wait()
	return err
}

// Source is the other end of a Feed.
type Source struct {
	// Blobs is the directory of the blobs.
	Blobs string

	conn *net.UnixConn
	mu   sync.Mutex
	have map[string]uint64 // how many bytes of a file are there
	err  error             // why no more arrives
	more chan struct{}     // closed, and replaced, when one of these changes
}

func newSource() *Source {
	return &Source{have: make(map[string]uint64), more: make(chan struct{})}
}

// Open opens the source of a directory. It returns nil if there is no feed, or a dead one. Another user's
// is refused, and so is anything but a socket: a link could lead to a socket of the host.
func Open(dir string) (*Source, error) {
	path := filepath.Join(dir, socketName)
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil, errors.Join(fmt.Errorf("%s is no socket: remove it", path), err)
	}
	s := newSource()
	// What was looked at is what is connected to.
	s.conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d", fd)})
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, nil // who served was killed, and containerd has none but complete blobs
	}
	if err == nil {
		err = s.begin()
	}
	if err != nil {
		s.Close()
		if _, gone := os.Lstat(path); errors.Is(gone, fs.ErrNotExist) {
			return nil, nil // it was closed meanwhile
		}
		return nil, fmt.Errorf("%s is still arriving: %w: %w", dir, ErrEnded, err)
	}
	return s, nil
}

// Beside opens the source of an unpacked image whose blobs are still arriving: its feed is
// beside the root of the topmost layer of the checkpoint. dirs is what images.ImageDirs returned. It
// returns nil if there is no feed: all is here, or nothing arrives any more.
func Beside(dirs []string) (*Source, error) {
	if len(dirs) == 0 {
		return nil, nil
	}
	return Open(filepath.Dir(filepath.Dir(dirs[0])))
}

func (s *Source) begin() error {
	if err := s.fromOurselves(); err != nil {
		return err
	}
	in := json.NewDecoder(s.conn)
	if err := s.readFirst(in); err != nil {
		return err
	}
	go s.listen(in)
	return nil
}

func (s *Source) readFirst(in *json.Decoder) error {
	var first note
	if err := in.Decode(&first); err != nil {
		return err
	}
	if first.Blobs == "" {
		return errors.New("it says nothing of any blob")
	}
	s.Blobs = first.Blobs
	return nil
}

// fromOurselves refuses a feed of another user.
func (s *Source) fromOurselves() error {
	peer, err := proc.Peer(s.conn)
	if err != nil {
		return err
	}
	if int(peer.Uid) != os.Geteuid() {
		return fmt.Errorf("it is of another user, %d", peer.Uid)
	}
	return nil
}

// listen takes all notes until the end.
func (s *Source) listen(in *json.Decoder) {
	for {
		var n note
		err := in.Decode(&n)
		s.mu.Lock()
		switch {
		case err != nil:
			s.err = ErrEnded
		case n.Failed != "":
			err = errors.New(n.Failed)
			s.err = err
		case n.Have == "":
			err = errors.New("the program that fetches the checkpoint is of another version of gpuckpt than the shim: install both of one")
			s.err = err
		default:
			s.have[n.Have] = n.Bytes
		}
		close(s.more)
		s.more = make(chan struct{})
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Set makes the source the Arrival of all that a checkpoint has in its Blobs.
func (s *Source) Set(c *images.Checkpoint) {
	set := func(l images.Location) {
		for i := range l {
			if path := l[i].Path; filepath.Dir(path) == s.Blobs {
				l[i].Arrival = arrival{s, path}
			}
		}
	}
	for _, a := range c.Areas() {
		set(a.Location)
	}
	for _, f := range c.Files {
		set(f.Pieces)
	}
}

// Close ends the connection. Whoever waits gets ErrEnded. It can be called on nil.
func (s *Source) Close() {
	if s != nil && s.conn != nil {
		s.conn.Close()
	}
}

// arrival is a file of a source.
type arrival struct {
	s    *Source
	path string
}

// Await waits until a range of the file is there.
func (a arrival) Await(ctx context.Context, _, to uint64) error {
	for {
		a.s.mu.Lock()
		have, err, more := a.s.have[a.path], a.s.err, a.s.more
		a.s.mu.Unlock()
		switch {
		case have >= to:
			return nil
		case err != nil:
			return err
		}
		select {
		case <-more:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
