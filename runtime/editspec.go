// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// editSpec has edit change the spec in a bundle's config.json. The parts of it
// that edit leaves alone (by the names at the top: "linux", "mounts" …) keep
// their text, known to this version or not. On an error the file is as it was.
func editSpec(bundle string, edit func(*specs.Spec) error) error {
	path := filepath.Join(bundle, "config.json")
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the container's spec: %w", err)
	}
	var texts map[string]json.RawMessage
	spec := new(specs.Spec)
	if err := json.Unmarshal(data, &texts); err != nil {
		return fmt.Errorf("read the container's spec %s: %w", path, err)
	}
	if err := json.Unmarshal(data, spec); err != nil {
		return fmt.Errorf("read the container's spec %s: %w", path, err)
	}
	before, err := parts(spec)
	if err != nil {
		return fmt.Errorf("read the container's spec %s: %w", path, err)
	}
	if err := edit(spec); err != nil {
		return err
	}
	after, err := parts(spec)
	if err != nil {
		return fmt.Errorf("edit the container's spec: %w", err)
	}
	changed := false
	for name, text := range after {
		if !bytes.Equal(text, before[name]) {
			texts[name], changed = text, true
		}
	}
	for name := range before {
		if _, ok := after[name]; !ok {
			delete(texts, name)
			changed = true
		}
	}
	if !changed {
		return nil
	}
	return writeSpec(path, texts)
}

// parts are the texts of a spec's parts.
func parts(spec *specs.Spec) (map[string]json.RawMessage, error) {
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	var texts map[string]json.RawMessage
	return texts, json.Unmarshal(data, &texts)
}

// writeSpec writes a config.json by rename.
func writeSpec(path string, texts map[string]json.RawMessage) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // "<" stays "<"
	if err := enc.Encode(texts); err != nil {
		return fmt.Errorf("edit the container's spec: %w", err)
	}
	next := path + ".gpuckpt"
	if err := os.WriteFile(next, b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("edit the container's spec: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("edit the container's spec: %w", err)
	}
	return nil
}
