// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// Encode returns a specification as JSON. It refuses one that CDI would not accept.
func Encode(spec *cdispecs.Spec) (_ []byte, err error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(spec); err != nil {
		return nil, fmt.Errorf("encode the CDI specification: %w", err)
	}
	// The library checks what it reads out of a file, and nothing else.
	f, err := os.CreateTemp("", "gpuckpt-cdi-*.json")
	if err != nil {
		return nil, fmt.Errorf("check the CDI specification: %w", err)
	}
	defer func() { err = errors.Join(err, os.Remove(f.Name())) }()
	_, err = f.Write(b.Bytes())
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("check the CDI specification: %w", err)
	}
	if _, err := cdilib.ReadSpec(f.Name(), 0); err != nil {
		return nil, fmt.Errorf("check the CDI specification: %w", err)
	}
	return b.Bytes(), nil
}
