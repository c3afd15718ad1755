// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

// both makes a feed and opens its source.
func both(t *testing.T) (*Feed, *Source) {
	t.Helper()
	// Longer than a socket's address may be.
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	f := serving(t, dir, ".")
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return f, s
}

func serving(t *testing.T, dir, blobs string) *Feed {
	t.Helper()
	f := New()
	if err := f.Serve(dir, blobs); err != nil {
		t.Fatal(err)
	}
	return f
}

// of is a checkpoint with a piece for each path, which arrives from s.
func of(s *Source, paths ...string) *images.Checkpoint {
	a := images.Area{File: "gpu-1-0"}
	for _, p := range paths {
		a.Location = append(a.Location, images.Piece{Path: p})
	}
	c := &images.Checkpoint{Metadata: &images.Metadata{Processes: []images.Process{{Areas: []images.Area{a}}}}}
	s.Set(c)
	return c
}

func await(ctx context.Context, c *images.Checkpoint, piece int) error {
	return c.Areas()[0].Location[piece].Arrival.Await(ctx, 0, 1)
}

// Who waits for a file goes on when it has arrived, also one that came later than the source, and
// one that arrived before another failed.
func TestArrives(t *testing.T) {
	f, s := both(t)
	if s.Blobs != "." {
		t.Errorf("the blobs are in %q", s.Blobs)
	}
	c := of(s, "a", "b", "c")
	f.Have("b", 1)
	if err := await(t.Context(), c, 1); err != nil {
		t.Error(err)
	}
	waiting := make(chan error)
	go func() { waiting <- await(t.Context(), c, 0) }()
	f.Have("a", 1)
	if err := <-waiting; err != nil {
		t.Error(err)
	}
	given, cancel := context.WithCancel(t.Context())
	cancel()
	if err := await(given, c, 2); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	go func() { waiting <- await(t.Context(), c, 2) }()
	f.Fail(errors.New("the registry is gone"))
	if err := <-waiting; err == nil || err.Error() != "the registry is gone" {
		t.Errorf("a file that never comes: %v", err)
	}
	if err := await(t.Context(), c, 0); err != nil {
		t.Errorf("a file that is here: %v", err)
	}
	s.Close()
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// A piece that is not among the blobs does not arrive: it is here.
func TestElsewhere(t *testing.T) {
	_, s := both(t)
	c := of(s, "a", "/layer/.gpuckpt/gpu-1-0.000000000000")
	if at := c.Areas()[0].Location; at[0].Arrival == nil || at[1].Arrival != nil {
		t.Errorf("they are %+v", at)
	}
}

// Who waits for the first bytes of a file goes on when these are there.
func TestParts(t *testing.T) {
	f, s := both(t)
	at := of(s, "a").Areas()[0].Location[0].Arrival
	f.Have("a", 10)
	if err := at.Await(t.Context(), 0, 10); err != nil {
		t.Error(err)
	}
	given, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := at.Await(given, 0, 11); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("more than there is: %v", err)
	}
	f.Have("a", 12)
	if err := at.Await(t.Context(), 0, 12); err != nil {
		t.Error(err)
	}
	f.Fail(errors.New("gone"))
	if err := at.Await(t.Context(), 0, 13); err == nil || err.Error() != "gone" {
		t.Errorf("bytes that never come: %v", err)
	}
	s.Close()
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// Whoever waits hears of the end of the program that fetches, which waits until nobody opens its files any more.
func TestEnds(t *testing.T) {
	f, s := both(t)
	c := of(s, "a")
	waiting, closed := make(chan error), make(chan error, 1)
	go func() { waiting <- await(t.Context(), c, 0) }()
	go func() { closed <- f.Close() }()
	if err := <-waiting; !errors.Is(err, ErrEnded) {
		t.Errorf("got %v", err)
	}
	select {
	case err := <-closed:
		t.Errorf("it has ended, %v, and files may still be opened", err)
	case <-time.After(50 * time.Millisecond):
	}
	s.Close()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(f.path), "*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %q, %v", left, err)
	}
}

// A directory without a feed has none, nor has one whose program was killed. One that is no feed's is an error. A new feed takes the place of an old one.
func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	if s, err := Open(dir); s != nil || err != nil {
		t.Errorf("without a feed: %v, %v", s, err)
	}
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: filepath.Join(dir, socketName)})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	said := make(chan error, 1)
	go func() {
		c, err := stale.Accept()
		if err == nil {
			_, err = c.Write([]byte("{}\n"))
			c.Close()
		}
		said <- err
	}()
	if _, err := Open(dir); !errors.Is(err, ErrEnded) || !strings.Contains(err.Error(), "says nothing of any blob") {
		t.Errorf("no feed: %v", err)
	}
	if err := <-said; err != nil {
		t.Error(err)
	}
	stale.Close()
	if s, err := Open(dir); s != nil || err != nil {
		t.Errorf("a feed that has ended: %v, %v", s, err)
	}
	f := serving(t, dir, "/")
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// A link in the place of the socket is not followed, nor is a file taken for one.
func TestOpenFollowsNoLink(t *testing.T) {
	f, s := both(t)
	defer f.Close()
	defer s.Close()
	dir := t.TempDir()
	if err := os.Symlink(f.path, filepath.Join(dir, socketName)); err != nil {
		t.Fatal(err)
	}
	if s, err := Open(dir); err == nil || !strings.Contains(err.Error(), "is no socket") {
		s.Close()
		t.Errorf("a link: %v", err)
	}
	dir = t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, socketName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "is no socket") {
		t.Errorf("a file: %v", err)
	}
}

// A feed is told before it serves, and says all of it then.
func TestToldBeforeItServes(t *testing.T) {
	f, dir := New(), t.TempDir()
	f.Have("/b", 10)
	f.Have("/a", 1)
	if err := f.Serve(dir, "/"); err != nil {
		t.Fatal(err)
	}
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	c := of(s, "/a", "/b")
	if err := await(t.Context(), c, 0); err != nil {
		t.Error(err)
	}
	if err := c.Areas()[0].Location[1].Arrival.Await(t.Context(), 0, 10); err != nil {
		t.Error(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- f.Close() }()
	if err := await(t.Context(), of(s, "/c"), 0); !errors.Is(err, ErrEnded) {
		t.Errorf("after the end: %v", err)
	}
	s.Close()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// Whatever the other side sends, the source ends with it, and whoever waits for a file that it did
// not name gets an error.
func FuzzSource(f *testing.F) {
	f.Add([]byte(`{"blobs":"/a"}{"have":"a","bytes":5}{"failed":"why"}`))
	f.Add([]byte(`{"blobs":null}{"have":"b","bytes":1}`))
	f.Add([]byte(`{"blobs":"/a"}{"arrived":"a"}`)) // of an early version
	f.Add([]byte(`{"blobs":{}}`))
	f.Add([]byte(`{"blobs":"/a"}{"have":"a","bytes":9}{"have":"a","bytes":3}{"have":"a","bytes":-1}`))
	f.Fuzz(func(t *testing.T, sent []byte) {
		s := newSource()
		in := json.NewDecoder(bytes.NewReader(sent))
		if s.readFirst(in) != nil {
			return
		}
		if s.Blobs == "" {
			t.Fatal("no directory was taken for one")
		}
		s.listen(in)
		if (arrival{s, "never named " + string(sent)}).Await(t.Context(), 0, 1) == nil {
			t.Fatal("a file that nobody has named has arrived")
		}
		if err := (arrival{s, "a"}).Await(t.Context(), 0, 1); (err == nil) != (s.have["a"] > 0) {
			t.Fatalf("a file that was named: %v", err)
		}
	})
}

// Beside an unpacked image. A dead feed is replaced, and until then is none.
func TestBeside(t *testing.T) {
	snapshot := t.TempDir()
	dirs := []string{filepath.Join(snapshot, "fs", images.ImageDir)}
	if s, err := Beside(dirs); s != nil || err != nil {
		t.Fatalf("without a feed: %v, %v", s, err)
	}
	for range 2 {
		f := serving(t, snapshot, "/")
		first, err := Beside(dirs)
		if err != nil {
			t.Fatal(err)
		}
		defer first.Close()
		f.Have("/a", 1)
		f.Fail(errors.New("no more"))
		if err := await(t.Context(), of(first, "/b"), 0); err == nil || err.Error() != "no more" {
			t.Errorf("a failure is told as %v", err)
		}
		if err := f.listener.Close(); err != nil { // it dies
			t.Fatal(err)
		}
	}
	if s, err := Beside(dirs); s != nil || err != nil {
		t.Errorf("a dead feed: %v, %v", s, err)
	}
}

// A feed that is being closed, and waits for one who does not read, is none any more for the next.
func TestOpenWhileItCloses(t *testing.T) {
	dir := t.TempDir()
	f := serving(t, dir, "/top")
	deaf, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: filepath.Join(dir, socketName)})
	if err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		f.Have("/"+strings.Repeat("long", 1000), 1)
	}
	closed := make(chan error, 1)
	go func() { closed <- f.Close() }()
	for {
		s, err := Open(dir)
		if err != nil {
			t.Error(err)
		}
		if s == nil {
			break
		}
		s.Close()
	}
	_ = deaf.Close()
	if err := <-closed; err != nil {
		t.Error(err)
	}
}
