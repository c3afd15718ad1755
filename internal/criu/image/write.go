// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// ErrOmit is returned by an edit to leave an entry out, and the data behind it.
var ErrOmit = errors.New("leave this entry out")

// maxText bounds a file that is text, in bytes.
const maxText = 1 << 20

// Part is a part of a file, in bytes.
type Part struct{ Offset, Bytes uint64 }

// Copy writes all that CRIU may read into a directory: each entry again, in the one form that
// its type has, and what is lent to CRIU as it is. edit, if it is not nil, gets each entry
// before it is written, may change the message, and may refuse the image by an error or leave
// the entry out by ErrOmit. It must not change how much data follows. After an error the
// directory is of no use.
func (s *Set) Copy(ctx context.Context, to *Dir, edit func(*Entry) error) error {
	names, err := s.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := s.copy(ctx, to, name, edit); err != nil {
			return err
		}
	}
	return nil
}

// text reads a file that is text.
func (s *Set) text(name string, k *Kind) ([]byte, error) {
	f, _, err := s.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := readText(k.form, f)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrRefused, name, err)
	}
	return data, nil
}

// Append adds entries to an image that has no data behind its entries, and makes the image if there is
// none. After an error a part of an entry may be there.
func (s *Set) Append(name string, messages ...proto.Message) error {
	f, err := os.OpenFile(filepath.Join(s.dir, name), os.O_WRONLY|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	var data []byte
	if st.Size() == 0 {
		for _, word := range s.head(KindOf(name)) {
			data = binary.LittleEndian.AppendUint32(data, word)
		}
	}
	for _, m := range messages {
		body, err := proto.Marshal(m)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		data = append(binary.LittleEndian.AppendUint32(data, uint32(len(body))), body...)
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}

// Edit writes an image of entries again, with edit as in Copy. After an error it is of no use.
func (s *Set) Edit(name string, edit func(*Entry) error) error {
	var data bytes.Buffer
	if err := s.rewrite(&data, KindOf(name), name, edit); err != nil {
		return err
	}
	to, err := os.OpenFile(filepath.Join(s.dir, name), os.O_WRONLY|os.O_TRUNC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	_, err = to.Write(data.Bytes())
	return errors.Join(err, to.Close())
}

func (s *Set) copy(ctx context.Context, to *Dir, name string, edit func(*Entry) error) error {
	k := KindOf(name)
	switch k.form {
	case leftOut:
		return nil
	case lent:
		return s.lend(ctx, to, name)
	case descriptors, devices:
		data, err := s.text(name, k)
		if err != nil {
			return err
		}
		return to.write(name, func(w *os.File) error {
			_, err := w.Write(data)
			return err
		})
	}
	return to.write(name, func(w *os.File) error { return s.rewrite(w, k, name, edit) })
}

// lend has CRIU read a file as it is, or a copy of what it needs of it. A file in pieces is copied in any case: it is one of
// which CRIU needs little (pages.Chosen).
func (s *Set) lend(ctx context.Context, to *Dir, name string) error {
	var parts []Part
	some := false
	if s.Parts != nil {
		parts, some = s.Parts(name)
	}
	if _, pieces := s.pieces[name]; !some && !pieces {
		f, err := s.OpenFile(name)
		if err != nil {
			return err
		}
		defer f.Close()
		return to.Bind(name, f)
	}
	from, err := s.Memory(name)
	if err != nil {
		return err
	}
	r := from.Open(ctx)
	defer r.Close()
	return to.write(name, func(w *os.File) error {
		if !some {
			return mmapfile.Copy(w, io.NewSectionReader(r, 0, int64(from.Bytes)))
		}
		buf := make([]byte, 1<<20)
		for _, p := range parts {
			if p.Offset+p.Bytes > from.Bytes {
				return fmt.Errorf("%w: %s is cut short: %w", images.ErrDamaged, name, io.ErrUnexpectedEOF)
			}
			if err := r.WriteRange(w, p.Offset, p.Offset+p.Bytes, buf); err != nil {
				return fmt.Errorf("copy CRIU's image %s: %w", name, err)
			}
		}
		return nil
	})
}

// rewrite writes an image of entries again.
func (s *Set) rewrite(w io.Writer, k *Kind, name string, edit func(*Entry) error) error {
	b := bufio.NewWriter(w)
	for _, word := range s.head(k) {
		if err := binary.Write(b, binary.LittleEndian, word); err != nil {
			return err
		}
	}
	if err := s.each(name, func(e *Entry, data *io.LimitedReader) error { return put(b, e, data, edit) }); err != nil {
		return err
	}
	return b.Flush()
}

func put(w *bufio.Writer, e *Entry, data *io.LimitedReader, edit func(*Entry) error) error {
	if edit != nil {
		before := dataOf(e)
		err := edit(e)
		if errors.Is(err, ErrOmit) {
			return skip(data)
		}
		if err != nil {
			return err
		}
		if dataOf(e) != before {
			return e.Errorf("an edit changed how much data follows")
		}
		if err := check(e.Message.ProtoReflect()); err != nil {
			return e.Errorf("an edit: %w", err)
		}
	}
	body, err := (proto.MarshalOptions{Deterministic: true}).Marshal(e.Message)
	if err != nil {
		return e.Errorf("%w", err)
	}
	var length [4]byte
	binary.LittleEndian.PutUint32(length[:], uint32(len(body)))
	if _, err := w.Write(append(length[:], body...)); err != nil {
		return err
	}
	if e.Data == 0 {
		return nil
	}
	n, err := io.Copy(w, data)
	if err == nil && n != e.Data {
		err = fmt.Errorf("%w: %w", images.ErrDamaged, e.Errorf("it is cut short: %w", io.ErrUnexpectedEOF))
	}
	return err
}

// dataOf returns what an entry says about what follows it.
func dataOf(e *Entry) [2]int64 {
	l := &layout{kind: e.Kind}
	n := l.read(e.Message)
	return [2]int64{n, int64(l.left)}
}

// readText reads a file that is text, and returns it in canonical form.
func readText(of form, f io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, maxText+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxText {
		return nil, fmt.Errorf("it has more than %d bytes", maxText)
	}
	if of == descriptors {
		return readDescriptors(data)
	}
	for line := range strings.Lines(string(data)) {
		if !deviceFile().MatchString(line) {
			return nil, fmt.Errorf("%q is not a file of a device", line)
		}
	}
	return data, nil
}

// pipe is how runc writes a container's standard stream that is a pipe.
var pipe = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^pipe:\[[0-9]{1,20}\]$`) })

// deviceFile is what gpuckpt's CRIU plugin notes of an open file: its number, flags and device, or what
// an eventfd counts or a timer waits for (package told). The plugin opens the container's own devices alone, which it
// knows from the shim.
var deviceFile = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^[0-9]{1,10}\t[0-9]{1,10}\t(/[ -~]{1,254}|(semaphore|counter|timer [0-9]( [0-9]{1,20}){4}) [0-9]{1,20})\n$`)
})

// readDescriptors reads what runc notes of a container's three standard streams. runc hands CRIU
// its own stream of that number in the place of each pipe, by the number's place in the list
// alone.
func readDescriptors(data []byte) ([]byte, error) {
	var streams []string
	if err := json.Unmarshal(data, &streams); err != nil {
		return nil, err
	}
	if len(streams) > 3 {
		return nil, fmt.Errorf("it has %d descriptors, and a container three streams", len(streams))
	}
	for i, name := range streams {
		if !pipe().MatchString(name) {
			streams[i] = "" // runc has no use for others
		}
	}
	return json.Marshal(streams)
}
