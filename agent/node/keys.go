// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
)

// Key returns the public half of the node's key, in PEM. The key is made if there is none.
func (n Node) Key(ctx context.Context) (string, error) {
	cmd, err := n.command(ctx, "key", "show")
	if err != nil {
		return "", err
	}
	out, err := cmd.Output()
	if failed, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("gpuckpt key show: %w: %s", err, strings.TrimSpace(string(failed.Stderr)))
	}
	return string(out), err
}

// Trust has the node trust keys, by the names of their nodes, and no others of the cluster's: each
// node's are a file of Keys, which the node's configuration names. A text that is no key is left out,
// since with it in a file no restore of the node would go on.
func (n Node) Trust(keys map[string][]string) error {
	dir, err := securejoin.SecureJoin(n.Root, n.Keys) // a link is of the node's root
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		return fmt.Errorf("keep the keys of the cluster's nodes: %w", err)
	}
	old, err := filepath.Glob(filepath.Join(dir, "*"+public))
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range old {
		if text(keys[strings.TrimSuffix(filepath.Base(file), public)]) == nil {
			errs = append(errs, os.Remove(file))
		}
	}
	for name, all := range keys {
		data := text(all)
		if data == nil {
			continue
		}
		file := filepath.Join(dir, name+public)
		if now, err := os.ReadFile(file); err == nil && string(now) == string(data) {
			continue
		}
		if err := os.WriteFile(file+".new", data, 0o644); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, os.Rename(file+".new", file))
	}
	return errors.Join(errs...)
}

// public is the end of the names of files that have public keys.
const public = ".pub"

// text returns those of a node's keys that are such as sign checkpoints, nil for none.
func text(keys []string) (data []byte) {
	for _, key := range keys {
		block, rest := pem.Decode([]byte(key))
		if block == nil || len(rest) > 0 || len(block.Headers) > 0 {
			continue
		}
		parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
		if err != nil {
			continue
		}
		p256, ok := parsed.(*ecdsa.PublicKey)
		if _, ed := parsed.(ed25519.PublicKey); ed || ok && p256.Curve == elliptic.P256() {
			data = append(data, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: block.Bytes})...)
		}
	}
	return data
}
