// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package bundle reads and writes the config.json of a container's bundle.
//
// The client writes the file before Create. Create reads it once, its steps edit the Spec in
// memory, and Save writes what they changed, once, before runc reads it.
package bundle

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// File is the config.json of a bundle.
type File struct {
	// Spec is what the file holds, to be edited.
	Spec *specs.Spec

	path string
	data []byte // as it was
}

// Warm looks up what encoding/json needs of a spec, which takes a millisecond, before there is one.
func Warm() { _ = json.Unmarshal([]byte("{}"), new(specs.Spec)) }

// Read reads the config.json in a directory.
func Read(dir string) (*File, error) {
	f := &File{path: filepath.Join(dir, "config.json")}
	var err error
	if f.data, err = os.ReadFile(f.path); err != nil {
		return nil, fmt.Errorf("read the container's spec: %w", err)
	}
	if err = json.Unmarshal(f.data, &f.Spec); err == nil && f.Spec == nil { // "null"
		err = errors.New("it is empty")
	}
	if err != nil {
		return nil, fmt.Errorf("read the container's spec %s: %w", f.path, err)
	}
	return f, nil
}

// Save writes the file if Spec was changed. The parts that were not ("linux",
// "mounts" …) keep their text, known to this version or not, white space between the
// values aside. On an error the file is as it was.
func (f *File) Save() (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write the container's spec: %w", err)
		}
	}()
	var was specs.Spec
	var texts map[string]json.RawMessage
	if err := errors.Join(json.Unmarshal(f.data, &was), json.Unmarshal(f.data, &texts)); err != nil {
		return err
	}
	changed, err := changes(&was, f.Spec)
	if err != nil || len(changed) == 0 {
		return err
	}
	maps.Copy(texts, changed)
	maps.DeleteFunc(texts, func(_ string, text json.RawMessage) bool { return text == nil })
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // "<" stays "<"
	if err := enc.Encode(texts); err != nil {
		return err
	}
	next := f.path + ".gpuckpt"
	if err := os.WriteFile(next, b.Bytes(), 0o600); err != nil {
		return err
	}
	if err := os.Rename(next, f.path); err != nil {
		return err
	}
	f.data = b.Bytes()
	return nil
}

// changes returns the texts of the parts of a spec that differ, nil for one that it has no more. Most specs have a
// large part, which is not changed: to write all of them took as long as to read them.
func changes(was, is *specs.Spec) (map[string]json.RawMessage, error) {
	texts := make(map[string]json.RawMessage)
	before, now := reflect.ValueOf(was).Elem(), reflect.ValueOf(is).Elem()
	for i := range now.NumField() {
		if reflect.DeepEqual(before.Field(i).Interface(), now.Field(i).Interface()) {
			continue
		}
		name, omit, _ := strings.Cut(now.Type().Field(i).Tag.Get("json"), ",")
		if empty := now.Field(i).IsZero() || now.Field(i).Kind() != reflect.Pointer && now.Field(i).Len() == 0; empty && omit == "omitempty" {
			texts[name] = nil
			continue
		}
		text, err := json.Marshal(now.Field(i).Interface())
		if err != nil {
			return nil, err
		}
		texts[name] = text
	}
	return texts, nil
}

// HostID returns the host's id of an id in the container.
func HostID(id uint32, maps []specs.LinuxIDMapping) uint32 {
	for _, m := range maps {
		if id >= m.ContainerID && id-m.ContainerID < m.Size {
			return m.HostID + id - m.ContainerID
		}
	}
	return id
}
