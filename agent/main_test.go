// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/x509"
	"os"
	"os/exec"
	"testing"
)

// The image has no certificates: the controller, which has nothing of a node, knows the public authorities all the same,
// by which it deletes images in registries.
func TestAuthorities(t *testing.T) {
	const without = "WITHOUT_CERTIFICATES"
	if os.Getenv(without) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestAuthorities$")
		cmd.Env = append(os.Environ(), without+"=1", "SSL_CERT_FILE=/none", "SSL_CERT_DIR=/none")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	known, err := x509.SystemCertPool()
	if err != nil || known.Equal(x509.NewCertPool()) {
		t.Errorf("none is known, %v", err)
	}
}
