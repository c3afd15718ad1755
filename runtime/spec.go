// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// pointAtSettings makes the bundle's config.json name settings as CRIU's
// configuration file, and gives the container's own annotations and the file
// that CRIU would have read without that, "" for none. Everything else in
// config.json keeps its text, known to this version or not, white space between
// the values aside. On an error it is as it was.
func pointAtSettings(bundle, settings string) (own map[string]string, base string, err error) {
	path := filepath.Join(bundle, "config.json")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, "", fmt.Errorf("read the container's spec: %w", err)
	}
	var spec map[string]json.RawMessage
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, "", fmt.Errorf("read the container's spec %s: %w", path, err)
	}
	if spec == nil { // "null"
		return nil, "", fmt.Errorf("read the container's spec %s: it is empty", path)
	}
	if raw, ok := spec["annotations"]; ok {
		if err := json.Unmarshal(raw, &own); err != nil {
			return nil, "", fmt.Errorf("read the annotations in %s: %w", path, err)
		}
	}
	base, named := own[annotations.CRIUConfig]
	if !named {
		base = criuRuncConf
	}
	edited := make(map[string]string, len(own)+1)
	for k, v := range own {
		edited[k] = v
	}
	edited[annotations.CRIUConfig] = settings
	if spec["annotations"], err = json.Marshal(edited); err != nil {
		return nil, "", fmt.Errorf("edit the container's spec: %w", err)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // "<" stays "<"
	if err := enc.Encode(spec); err != nil {
		return nil, "", fmt.Errorf("edit the container's spec: %w", err)
	}
	next := path + ".gpuckpt"
	if err := os.WriteFile(next, b.Bytes(), 0o600); err != nil {
		return nil, "", fmt.Errorf("edit the container's spec: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return nil, "", fmt.Errorf("edit the container's spec: %w", err)
	}
	return own, base, nil
}

// loadSpec reads the bundle's config.json.
func loadSpec(bundle string) (*specs.Spec, error) {
	data, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return nil, fmt.Errorf("read the container's spec: %w", err)
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(data, spec); err != nil {
		return nil, fmt.Errorf("read the container's spec: %w", err)
	}
	if spec.Process == nil || spec.Linux == nil {
		return nil, fmt.Errorf("the container's spec has no process or is not for Linux: %w", errdefs.ErrInvalidArgument)
	}
	return spec, nil
}
