// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
)

// sign returns the Ed25519 signature of a text, as "openssl pkeyutl -verify -rawin" checks it.
func sign(key string, text []byte) ([]byte, error) {
	data, err := os.ReadFile(key)
	if err != nil {
		return nil, fmt.Errorf("sign the checksums: %w", err)
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, fmt.Errorf("sign the checksums: %s is not in PEM", key)
	}
	private, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("sign the checksums: %s: %w", key, err)
	}
	ed, ok := private.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("sign the checksums: %s is a %T, not an Ed25519 key (openssl genpkey -algorithm ed25519)", key, private)
	}
	return ed25519.Sign(ed, text), nil
}
