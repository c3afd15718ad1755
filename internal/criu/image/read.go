// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/checkpoint-restore/go-criu/v8/magic"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
)

const (
	// maxBytes bounds what is read of the entries of one checkpoint, in bytes. A thread takes
	// up to 5 KiB, a process and a mount 200 bytes, an open file 100: a program with 5,000
	// threads and 50,000 open files has 30 MiB.
	maxBytes = 32 << 20
	// maxLarge bounds the images that say where memory goes: 15 bytes for each run of pages.
	maxLarge = 256 << 20
	// maxEntry bounds one entry, in bytes: decoded it may take fifty times as much memory. The
	// largest has all seccomp filters; the kernel lets those of a thread have 256 KiB.
	maxEntry = 6 << 20
	// MaxMappings are as many of a process as have room in an entry, at some 66 bytes each.
	MaxMappings = 80_000
	// maxFiles bounds the files of a checkpoint. Each thread has an image.
	maxFiles = 200_000
)

// ErrRefused reports an image that CRIU could read and that a restore has no use for: it is
// not on the allow-list.
var ErrRefused = errors.New("gpuckpt does not restore it")

// Set is the images of one dump, which only it changes.
// All errors of a Set are images.ErrDamaged or ErrRefused, but those of a file that cannot be opened or read.
type Set struct {
	// Parts, if it is not nil, returns which parts of a file that is lent to CRIU, by its name, Copy
	// writes in its place, one behind the other; some is false for one that CRIU gets whole.
	Parts func(name string) (parts []Part, some bool)

	dir    string
	pieces map[string]images.File // files that are elsewhere, in pieces, by name
	magics map[string]uint64
	// Bytes that may still be read: of the files of each budget, each once.
	left, largeLeft int64
	charged         map[string]bool
}

// Entry is one entry of an image.
type Entry struct {
	// File is the name of the image, Kind what it is, N the number of the entry, from 0.
	File string
	Kind *Kind
	N    int
	// Message is the entry, which only an edit may change. It is valid until the function that gets it
	// returns, if the image's kind can have very many entries.
	Message proto.Message
	// Data is the size of what follows the entry in the image and is no message: the content
	// of a pipe, a queue or a file, in bytes.
	Data int64
}

// Errorf returns an error that names the entry.
func (e *Entry) Errorf(format string, args ...any) error {
	return fmt.Errorf("%s: entry %d: %w", e.File, e.N, fmt.Errorf(format, args...))
}

var magics = sync.OnceValue(func() map[string]uint64 { return magic.LoadMagic().ByName })

// Open returns the images in a directory, and those of some files that are in pieces elsewhere. It reads nothing yet. All
// entries together may have maxBytes, whoever asks for them.
func Open(dir string, files ...images.File) *Set {
	s := &Set{dir: dir, pieces: make(map[string]images.File), magics: magics(), left: maxBytes, largeLeft: maxLarge, charged: make(map[string]bool)}
	for _, f := range files {
		if f.Pieces != nil {
			s.pieces[f.Name] = f
		}
	}
	return s
}

// Names returns the names of all files, sorted. A file of an unknown kind, or one that is not a regular file, is an error.
func (s *Set) Names() (names []string, err error) {
	d, err := os.Open(s.dir)
	if err != nil {
		return nil, fmt.Errorf("read CRIU's images: %w", err)
	}
	defer d.Close()
	names = slices.Collect(maps.Keys(s.pieces))
	for {
		entries, err := d.ReadDir(1024)
		for _, e := range entries {
			if file, _, piece := images.ParsePieceFile(e.Name()); piece && s.pieces[file].Pieces != nil {
				continue
			}
			if KindOf(e.Name()) == nil {
				return nil, fmt.Errorf("%w: %q is no image that a restore needs", ErrRefused, e.Name())
			}
			if !e.Type().IsRegular() {
				return nil, fmt.Errorf("%w: %s is not a regular file", images.ErrDamaged, filepath.Join(s.dir, e.Name()))
			}
			names = append(names, e.Name())
		}
		if len(names) > maxFiles {
			return nil, fmt.Errorf("%w: more than %d files in %s", images.ErrDamaged, maxFiles, s.dir)
		}
		if errors.Is(err, io.EOF) {
			slices.Sort(names)
			return names, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read CRIU's images: %w", err)
		}
	}
}

// Has reports whether there is a file of that name.
func (s *Set) Has(name string) bool {
	_, err := os.Lstat(filepath.Join(s.dir, name))
	return !errors.Is(err, os.ErrNotExist) || s.pieces[name].Pieces != nil
}

// All calls do with every entry of every image, by the names of the files. It refuses what Copy
// would refuse.
func (s *Set) All(do func(*Entry) error) error {
	names, err := s.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		switch k := KindOf(name); k.form {
		case entries:
			err = s.Each(name, do)
		case descriptors, devices:
			_, err = s.text(name, k)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Each calls do with one entry of an image after the other. The image's name must be one of
// entries.
func (s *Set) Each(name string, do func(*Entry) error) error {
	return s.each(name, func(e *Entry, data *io.LimitedReader) error {
		if err := do(e); err != nil {
			return err
		}
		return skip(data) // without reading it
	})
}

// EachOf calls do with the entries of one type in an image, or in all whose names match a pattern (path.Match), of which
// there may be none.
func EachOf[M proto.Message](s *Set, pattern string, do func(M) error) error {
	return s.matching(pattern, func(name string) error { return s.Each(name, of(do)) })
}

// EditOf is Edit for the entries of one type in an image, or in all whose names match a pattern.
func EditOf[M proto.Message](s *Set, pattern string, edit func(M) error) error {
	return s.matching(pattern, func(name string) error { return s.Edit(name, of(edit)) })
}

func of[M proto.Message](do func(M) error) func(*Entry) error {
	return func(e *Entry) error {
		if m, ok := e.Message.(M); ok {
			return do(m)
		}
		return nil
	}
}

// matching calls do with the names that match a pattern. One without a star is a name itself, also of no file.
func (s *Set) matching(pattern string, do func(name string) error) error {
	if !strings.Contains(pattern, "*") {
		return do(pattern)
	}
	names, err := s.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if matches, err := path.Match(pattern, name); err != nil {
			return err
		} else if !matches {
			continue
		}
		if err := do(name); err != nil {
			return err
		}
	}
	return nil
}

// each is Each that hands out the data of an entry as well, which do must read.
func (s *Set) each(name string, do func(*Entry, *io.LimitedReader) error) error {
	f, size, err := s.open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return s.read(f, size, name, do)
}

// OpenFile opens a file of the set that is not read here. It is a regular file.
func (s *Set) OpenFile(name string) (*os.File, error) {
	f, _, err := s.open(name)
	return f, err
}

// Memory returns where a file is that is not read here.
func (s *Set) Memory(name string) (*images.Area, error) {
	if f, ok := s.pieces[name]; ok {
		return f.Area(), nil
	}
	f, size, err := s.open(name)
	if err != nil {
		return nil, err
	}
	return images.File{Name: name, Path: f.Name(), Bytes: uint64(size)}.Area(), f.Close()
}

// ReadText parses a file of a dump that is text of ours, if there is one. parse reads it with Lines.
func ReadText[T any](dumped *Set, name string, parse func(io.Reader) (T, error)) (all T, err error) {
	if !dumped.Has(name) {
		return all, nil
	}
	f, err := dumped.OpenFile(name)
	if err != nil {
		return all, err
	}
	defer f.Close()
	return parse(f)
}

// Lines reads the lines of a file of a name, which have up to so many bytes each. do reports whether one is right:
// else the error is images.ErrDamaged, and shows the line.
func Lines(r io.Reader, name string, longest int, do func(line string) bool) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, longest)
	for lines.Scan() {
		if !do(lines.Text()) {
			return fmt.Errorf("%w: %s: line %q", images.ErrDamaged, name, lines.Text())
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%w: %s: %w", images.ErrDamaged, name, err)
	}
	return nil
}

// open opens an image, and charges it to its budget.
func (s *Set) open(name string) (*os.File, int64, error) {
	path := filepath.Join(s.dir, name)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, os.ErrNotExist) {
		return nil, 0, fmt.Errorf("%w: CRIU's image is missing or a symbolic link: %w", images.ErrDamaged, err)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("read CRIU's images: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, 0, fmt.Errorf("read CRIU's images: %w", err)
	}
	if !st.Mode().IsRegular() {
		f.Close()
		return nil, 0, fmt.Errorf("%w: %s is not a regular file", images.ErrDamaged, path)
	}
	return f, st.Size(), nil
}

// charge takes bytes of entries from the budget of their kind.
func (s *Set) charge(k *Kind, bytes int64) error {
	left, most := &s.left, int64(maxBytes)
	if k.large {
		left, most = &s.largeLeft, maxLarge
	}
	if *left -= bytes; *left < 0 {
		return fmt.Errorf("%w: CRIU's images in %s that are read have more than %d bytes", images.ErrDamaged, s.dir, most)
	}
	return nil
}

// read takes an image of entries apart: words that say what it is, then entries, each behind
// its length, and some with data behind them (criu.org/Images). do must read all of the data.
func (s *Set) read(f io.Reader, size int64, name string, do func(*Entry, *io.LimitedReader) error) error {
	first := !s.charged[name]
	s.charged[name] = true
	k := KindOf(name)
	damaged := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s: %w", images.ErrDamaged, filepath.Join(s.dir, name), fmt.Errorf(format, args...))
	}
	if k == nil || k.form != entries {
		return damaged("it is no image with entries")
	}
	// cut is the error of a read that has not come to its end: of an image that is shorter than it
	// says, or of a disk.
	cut := func(err error) error {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return damaged("it is cut short: %w", err)
		}
		return fmt.Errorf("read %s: %w", filepath.Join(s.dir, name), err)
	}
	b := bufio.NewReaderSize(io.LimitReader(f, size), int(min(size, 1<<16)))
	at := int64(0)
	word := func() (uint32, error) {
		var w [4]byte
		_, err := io.ReadFull(b, w[:])
		at += 4
		return binary.LittleEndian.Uint32(w[:]), err
	}
	for _, want := range s.head(k) {
		w, err := word()
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return cut(err)
		}
		if err != nil || w != want {
			return damaged("it begins with %#x, and is not of the kind %s", w, k.Magic)
		}
	}
	l := &layout{kind: k}
	var body []byte
	var reused proto.Message
	for {
		length, err := word()
		if errors.Is(err, io.EOF) {
			if why := l.complete(); why != "" {
				return damaged("%s", why)
			}
			return nil
		}
		if err != nil {
			return cut(err)
		}
		if length > maxEntry {
			return damaged("an entry has %d bytes, more than %d", length, maxEntry)
		}
		if first {
			if err := s.charge(k, 4+int64(length)); err != nil {
				return err
			}
		}
		if int64(length) > size-at {
			return damaged("it is cut short: %w", io.ErrUnexpectedEOF)
		}
		body = slices.Grow(body[:0], int(length))[:length]
		if _, err := io.ReadFull(b, body); err != nil {
			return cut(err)
		}
		at += int64(length)
		m := l.next()
		if m == nil {
			return damaged("it has more entries than one")
		}
		if k.large && l.n > 0 { // they are many, and of one type
			if reused == nil {
				reused = m
			}
			m = reused
			proto.Reset(m)
		}
		e := &Entry{File: name, Kind: k, N: l.n, Message: m}
		if err := proto.Unmarshal(body, m); err != nil {
			return damaged("entry %d: %w", e.N, err)
		}
		if err := check(m.ProtoReflect()); err != nil {
			return fmt.Errorf("%w: %w", ErrRefused, e.Errorf("%w", err))
		}
		if e.Data = l.read(m); e.Data == toTheEnd {
			e.Data = size - at
		}
		if e.Data < 0 || e.Data > size-at {
			return damaged("entry %d: it is cut short: %d bytes of data", e.N, e.Data)
		}
		data := &io.LimitedReader{R: b, N: e.Data}
		if err := do(e, data); err != nil {
			return err
		}
		if data.N != 0 {
			return damaged("entry %d: its data were not read", e.N)
		}
		at += e.Data
	}
}

// skip reads what is left.
func skip(l *io.LimitedReader) error {
	if b, ok := l.R.(*bufio.Reader); ok {
		for l.N > 0 {
			n, err := b.Discard(int(min(l.N, 1<<30)))
			if l.N -= int64(n); errors.Is(err, io.EOF) {
				return fmt.Errorf("%w: it is cut short: %w", images.ErrDamaged, err)
			} else if err != nil {
				return err
			}
		}
	}
	return nil
}

// head returns the words that an image of a kind begins with.
func (s *Set) head(k *Kind) []uint32 {
	own := uint32(s.magics[k.Magic])
	if k.Magic == "INVENTORY" {
		return []uint32{own}
	}
	return []uint32{uint32(s.magics["IMG_COMMON"]), own}
}
