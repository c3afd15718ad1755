// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package imagetest changes CRIU's images as an attacker would, for tests: every field of every
// message, by every kind of value. It knows the fields from the descriptors of go-criu's types, so
// that a field that a later go-criu brings is tried as well.
package imagetest

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/magic"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// File is an image in parts.
type File struct {
	Name    string
	head    []byte
	Entries []Part
}

// Part is an entry, and what follows it in the image and is no message.
type Part struct {
	Message proto.Message
	data    []byte
}

// Parse reads an image of a dump in a directory.
func Parse(dir, name string) (*File, error) {
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return nil, err
	}
	f, at := &File{Name: name, head: raw[:8]}, 8
	if name == "inventory.img" {
		f.head, at = raw[:4], 4
	}
	err = image.Open(dir).Each(name, func(e *image.Entry) error {
		at += 4 + int(binary.LittleEndian.Uint32(raw[at:]))
		f.Entries = append(f.Entries, Part{proto.Clone(e.Message), raw[at : at+int(e.Data)]})
		at += int(e.Data)
		return nil
	})
	return f, err
}

// Bytes returns the image as CRIU would write it.
func (f *File) Bytes() ([]byte, error) {
	b := slices.Clone(f.head)
	for _, e := range f.Entries {
		data, err := (proto.MarshalOptions{AllowPartial: true, Deterministic: true}).Marshal(e.Message)
		if err != nil {
			return nil, err
		}
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(data))), data...)
		b = append(b, e.data...)
	}
	return b, nil
}

// Write writes the image into a directory.
func (f *File) Write(dir string) error {
	b, err := f.Bytes()
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, f.Name), b, 0o600)
}

// unusual are images that a dump seldom has, by names that fit a dump of one container.
var unusual = []string{"tty-data.img", "userns-14.img", "netns-10.img", "pidns-9.img"}

// dumped returns the images of a dump, in parts, and with them one of each kind that it lacks.
func dumped(dir string) (files []*File, err error) {
	names, err := image.Open(dir).Names()
	if err != nil {
		return nil, err
	}
	has := make(map[string]bool)
	for _, name := range names {
		k := image.KindOf(name)
		if k.Magic == "" {
			continue
		}
		f, err := Parse(dir, name)
		if err != nil {
			return nil, err
		}
		has[k.Magic] = true
		files = append(files, f)
	}
	magics := magic.LoadMagic().ByName
	for _, name := range unusual {
		k := image.KindOf(name)
		if has[k.Magic] {
			continue
		}
		head := binary.LittleEndian.AppendUint32(nil, uint32(magics["IMG_COMMON"]))
		m := k.New(0)
		fill(m.ProtoReflect(), 3)
		files = append(files, &File{Name: name, head: binary.LittleEndian.AppendUint32(head, uint32(magics[k.Magic])), Entries: []Part{{Message: m}}})
	}
	return files, nil
}

// fill gives the fields of a message values that say little, so deep.
func fill(m protoreflect.Message, deep int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if fd.IsList() {
			element := m.Mutable(fd).List()
			if fd.Message() == nil {
				element.Append(plain(fd))
			} else if deep > 0 {
				fill(element.AppendMutable().Message(), deep-1)
			}
		} else if fd.Message() == nil {
			m.Set(fd, plain(fd))
		} else if deep > 0 {
			fill(m.Mutable(fd).Message(), deep-1)
		}
	}
}

func plain(fd protoreflect.FieldDescriptor) protoreflect.Value {
	switch fd.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString("x")
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte("x"))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(fd.Enum().Values().Get(0).Number())
	}
	return number(fd, 1)
}

// number returns a number in the type of a field.
func number(fd protoreflect.FieldDescriptor, n uint64) protoreflect.Value {
	switch fd.Kind() {
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return protoreflect.ValueOfUint32(uint32(n))
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return protoreflect.ValueOfUint64(n)
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind:
		return protoreflect.ValueOfInt32(int32(n))
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return protoreflect.ValueOfInt64(int64(n))
	}
	panic(fmt.Sprintf("%s is of a kind that CRIU's images did not have: %v", fd.FullName(), fd.Kind()))
}
