// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package imagetest

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// Change is one change of one field of a dump.
type Change struct {
	// File is the image, Entry the number of the entry in it.
	File  string
	Entry int
	// Field is the field's name; that of the message if an unknown field was added to it.
	Field protoreflect.FullName
	// Kind says what was done: "number 0x3", "missing".
	Kind string
	// Unset reports whether the field has no value afterwards; Unknown, whether one was added that
	// nobody knows.
	Unset, Unknown bool
	// Image is the image with the change.
	Image []byte
}

func (c Change) String() string {
	return fmt.Sprintf("%s: entry %d: %s: %s", c.File, c.Entry, c.Field, c.Kind)
}

// instances bounds how many messages of one type a field with a rule is changed in. After one that
// is refused a few more are tried.
const instances = 24

// Each has do try every change of the dump in a directory. paths are added to the values of texts.
// do reports whether the change was refused: by that Each chooses how many messages of a type it
// changes. Fields counts how often each field was changed, and how often that was refused.
func Each(dir string, paths []string, do func(Change) (refused bool)) (tried, refused map[protoreflect.FullName]int, err error) {
	files, err := dumped(dir)
	if err != nil {
		return nil, nil, err
	}
	w := &walk{do: do, paths: paths, tried: make(map[protoreflect.FullName]int), refused: make(map[protoreflect.FullName]int), changed: make(map[protoreflect.FullName]int), unknown: make(map[protoreflect.FullName]bool)}
	for _, f := range files {
		for i := range f.Entries {
			if err := w.entry(f, i); err != nil {
				return nil, nil, err
			}
		}
	}
	// Messages that the dump does not have, in those that it has.
	for _, f := range files {
		for i := range f.Entries {
			if err := w.absent(f, i); err != nil {
				return nil, nil, err
			}
		}
	}
	return w.tried, w.refused, nil
}

type walk struct {
	do      func(Change) bool
	paths   []string
	tried   map[protoreflect.FullName]int // changes
	refused map[protoreflect.FullName]int
	changed map[protoreflect.FullName]int // messages
	unknown map[protoreflect.FullName]bool
}

// entry changes each message of an entry.
func (w *walk) entry(f *File, i int) error {
	good := f.Entries[i].Message
	count := 0
	each(good.ProtoReflect(), func(protoreflect.Message) { count++ })
	for n := range count {
		if err := w.message(f, i, n); err != nil {
			return err
		}
	}
	return nil
}

// nth returns a message in an entry.
func nth(of proto.Message, n int) (found protoreflect.Message) {
	at := 0
	each(of.ProtoReflect(), func(m protoreflect.Message) {
		if at == n {
			found = m
		}
		at++
	})
	return found
}

func (w *walk) message(f *File, i, n int) error {
	good := f.Entries[i].Message
	m := nth(good, n)
	try := func(c Change, change func(protoreflect.Message)) error {
		changed := proto.Clone(good)
		change(nth(changed, n))
		f.Entries[i].Message = changed
		var err error
		c.Image, err = f.Bytes()
		f.Entries[i].Message = good
		if err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
		c.File, c.Entry = f.Name, i
		w.tried[c.Field]++
		if w.do(c) {
			w.refused[c.Field]++
		}
		return nil
	}
	if name := m.Descriptor().FullName(); !w.unknown[name] {
		w.unknown[name] = true
		if err := try(Change{Field: name, Kind: "an unknown field", Unknown: true}, func(m protoreflect.Message) {
			m.SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 999, protowire.VarintType), 1))
		}); err != nil {
			return err
		}
	}
	for j := range m.Descriptor().Fields().Len() {
		fd := m.Descriptor().Fields().Get(j)
		name := fd.FullName()
		may := image.Fields()[name].May
		most := 1
		if may == image.Ruled {
			most = instances
		}
		if w.changed[name] >= most || w.refused[name] > 0 && w.changed[name] > 3 {
			continue
		}
		w.changed[name]++
		all := w.values(m, fd)
		if may == image.Any { // the largest and the smallest will do
			for _, kind := range []string{"number 0x3", "number 0x40", "number 0xfff", "number 0xffffffff"} {
				delete(all, kind)
			}
		}
		if m.Has(fd) {
			all["missing"] = protoreflect.Value{}
		}
		for _, kind := range slices.Sorted(maps.Keys(all)) {
			value := all[kind]
			c := Change{Field: name, Kind: kind, Unset: !value.IsValid() || fd.IsList() && value.List().Len() == 0}
			if err := try(c, func(m protoreflect.Message) {
				if value.IsValid() {
					m.Set(fd, value)
				} else {
					m.Clear(fd)
				}
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// absent puts messages of types that the dump does not have into an entry, and changes those.
func (w *walk) absent(f *File, i int) error {
	good := f.Entries[i].Message
	defer func() { f.Entries[i].Message = good }()
	count := 0
	each(good.ProtoReflect(), func(protoreflect.Message) { count++ })
	for n := range count {
		fields := nth(good, n).Descriptor().Fields()
		for j := range fields.Len() {
			fd := fields.Get(j)
			if fd.Message() == nil || w.unknown[fd.Message().FullName()] || image.Fields()[fd.FullName()].May == image.Refused {
				continue
			}
			c := proto.Clone(good)
			m := nth(c, n)
			if fd.IsList() {
				fill(m.Mutable(fd).List().AppendMutable().Message(), 3)
			} else {
				fill(m.Mutable(fd).Message(), 3)
			}
			f.Entries[i].Message = c
			if err := w.entry(f, i); err != nil {
				return err
			}
			f.Entries[i].Message = good
		}
	}
	return nil
}

// EachMessage calls do with the type of every message in one, itself first.
func EachMessage(of proto.Message, do func(name protoreflect.FullName)) {
	each(of.ProtoReflect(), func(m protoreflect.Message) { do(m.Descriptor().FullName()) })
}

// each calls do with every message of an entry, itself first, in the order of the fields.
func each(m protoreflect.Message, do func(protoreflect.Message)) {
	do(m)
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		switch {
		case fd.Message() == nil || !m.Has(fd):
		case fd.IsList():
			for i := range m.Get(fd).List().Len() {
				each(m.Get(fd).List().Get(i).Message(), do)
			}
		default:
			each(m.Get(fd).Message(), do)
		}
	}
}

// values are what a field is set to, by kinds.
func (w *walk) values(m protoreflect.Message, fd protoreflect.FieldDescriptor) map[string]protoreflect.Value {
	v := make(map[string]protoreflect.Value)
	add := func(kind string, value protoreflect.Value) {
		if fd.IsList() {
			list := m.NewField(fd).List()
			list.Append(value)
			value = protoreflect.ValueOfList(list)
		}
		v[kind] = value
	}
	switch fd.Kind() {
	case protoreflect.StringKind:
		for kind, s := range map[string]string{"way out": "../../../etc/shadow", "link": "/proc/self/exe", "NUL": "/a\x00b", "empty": "", "long": strings.Repeat("x", 5000)} {
			add(kind, protoreflect.ValueOfString(s))
		}
		for i, s := range slices.Concat([]string{"/proc/self/fd/126/../../etc"}, w.paths) {
			add(fmt.Sprintf("path %d", i), protoreflect.ValueOfString(s))
		}
	case protoreflect.BytesKind:
		add("empty", protoreflect.ValueOfBytes(nil))
		for i, s := range slices.Concat([]string{"/../../etc/x"}, w.paths) {
			add(fmt.Sprintf("path %d", i), protoreflect.ValueOfBytes([]byte(s)))
		}
	case protoreflect.BoolKind:
		add("flag", protoreflect.ValueOfBool(!fd.IsList() && !m.Get(fd).Bool()))
	case protoreflect.EnumKind:
		for i := range fd.Enum().Values().Len() {
			n := fd.Enum().Values().Get(i).Number()
			add(fmt.Sprintf("number %d", n), protoreflect.ValueOfEnum(n))
		}
	case protoreflect.MessageKind:
		if fd.IsList() {
			add("empty", m.NewField(fd).List().NewElement())
		} else {
			v["empty"] = m.NewField(fd)
		}
	default:
		for _, n := range []uint64{0, 1, 3, 64, 0xfff, math.MaxUint32, math.MaxUint64} {
			add(fmt.Sprintf("number %#x", n), number(fd, n))
		}
	}
	if fd.IsList() && m.Get(fd).List().Len() > 0 { // one more, and one again and again
		old := m.Get(fd).List()
		for kind, times := range map[string]int{"twice": 1, "often": 70} {
			list := m.NewField(fd).List()
			for i := range old.Len() {
				list.Append(old.Get(i))
			}
			for range times {
				list.Append(old.Get(0))
			}
			v["repeated "+kind] = protoreflect.ValueOfList(list)
		}
	}
	return v
}

// Put makes the change in a dump. undo brings the image back that was there, or none.
func (c Change) Put(dir string) (undo func() error, err error) {
	path := filepath.Join(dir, c.File)
	was, err := os.ReadFile(path)
	undo = func() error { return os.WriteFile(path, was, 0o600) }
	if errors.Is(err, os.ErrNotExist) {
		undo, err = func() error { return os.Remove(path) }, nil
	}
	if err == nil {
		err = os.WriteFile(path, c.Image, 0o600)
	}
	return undo, err
}
