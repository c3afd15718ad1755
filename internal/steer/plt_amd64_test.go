// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPLTEntryIn(t *testing.T) {
	library, err := os.ReadFile(filepath.Join(filepath.Dir(copyTarget(t)), "libcuda.so.1"))
	if err != nil {
		t.Fatal(err)
	}
	at, err := pltEntryIn(bytes.NewReader(library), "memcpy")
	if err != nil || at == 0 || at%8 != 0 {
		t.Errorf("memcpy is called by %#x, %v", at, err)
	}
	if _, err := pltEntryIn(bytes.NewReader(library), "memmove"); err == nil || !strings.Contains(err.Error(), "does not call memmove") {
		t.Errorf("memmove: %v", err)
	}
	for n := 0; n < len(library); n += 97 { // sections come last
		if at, err := pltEntryIn(bytes.NewReader(library[:n]), "memcpy"); err == nil {
			t.Errorf("of %d bytes: %#x", n, at)
		}
	}
}

func FuzzPLTEntryIn(f *testing.F) {
	if self, err := os.ReadFile("/proc/self/exe"); err == nil {
		f.Add(self[:min(len(self), 64<<10)])
	}
	if libraries, _ := filepath.Glob("/lib/x86_64-linux-gnu/libdl.so*"); len(libraries) > 0 {
		if b, err := os.ReadFile(libraries[0]); err == nil {
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, library []byte) {
		_, _ = pltEntryIn(bytes.NewReader(library), "memcpy")
	})
}
