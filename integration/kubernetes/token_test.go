// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
)

// claims returns what a service account's token says (RFC 7519), unverified.
func claims(t *testing.T, token string) (text []byte) {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("%q is no token", token)
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// subjectOf is who a token is for.
func subjectOf(t *testing.T, token string) string {
	t.Helper()
	var said struct {
		Subject string `json:"sub"`
	}
	if err := json.Unmarshal(claims(t, token), &said); err != nil {
		t.Fatal(err)
	}
	return said.Subject
}
