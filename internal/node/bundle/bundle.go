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

	"github.com/opencontainers/runtime-spec/specs-go"
)

// File is the config.json of a bundle.
type File struct {
	// Spec is what the file holds, to be edited.
	Spec *specs.Spec

	path  string
	texts map[string]json.RawMessage // of all parts, by the names at the top
	known map[string]json.RawMessage // of those that Spec has, as they were
}

// Read reads the config.json in a directory.
func Read(dir string) (*File, error) {
	f := &File{Spec: new(specs.Spec), path: filepath.Join(dir, "config.json")}
	data, err := os.ReadFile(f.path)
	if err != nil {
		return nil, fmt.Errorf("read the container's spec: %w", err)
	}
	err = json.Unmarshal(data, &f.texts)
	if err == nil && f.texts == nil { // "null"
		err = errors.New("it is empty")
	}
	if err == nil {
		err = json.Unmarshal(data, f.Spec)
	}
	if err == nil {
		f.known, err = parts(f.Spec)
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
	now, err := parts(f.Spec)
	if err != nil {
		return err
	}
	if maps.EqualFunc(now, f.known, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
		return nil
	}
	for name, text := range now {
		if !bytes.Equal(text, f.known[name]) {
			f.texts[name] = text
		}
	}
	maps.DeleteFunc(f.texts, func(name string, _ json.RawMessage) bool { return f.known[name] != nil && now[name] == nil })
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // "<" stays "<"
	if err := enc.Encode(f.texts); err != nil {
		return err
	}
	next := f.path + ".gpuckpt"
	if err := os.WriteFile(next, b.Bytes(), 0o600); err != nil {
		return err
	}
	if err := os.Rename(next, f.path); err != nil {
		return err
	}
	f.known = now
	return nil
}

// parts returns the texts of a spec's parts.
func parts(spec *specs.Spec) (map[string]json.RawMessage, error) {
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	var texts map[string]json.RawMessage
	return texts, json.Unmarshal(data, &texts)
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
