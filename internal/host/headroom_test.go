// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"path/filepath"
	"testing"
)

func TestReadNumber(t *testing.T) {
	for text, want := range map[string]struct {
		n  uint64
		ok bool
	}{
		"4096\n":                {4096, true},
		"9223372036854771712\n": {9223372036854771712, true},
		"max\n":                 {0, false},
		"":                      {0, false},
		"-1\n":                  {0, false},
	} {
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if n, ok := readNumber(path); n != want.n || ok != want.ok {
			t.Errorf("%q: got %d, %v; want %d, %v", text, n, ok, want.n, want.ok)
		}
	}
	if _, ok := readNumber(filepath.Join(t.TempDir(), "none")); ok {
		t.Error("a number in a file that is not there")
	}
}

func TestStatSum(t *testing.T) {
	path := filepath.Join(t.TempDir(), "memory.stat")
	if err := os.WriteFile(path, []byte("cache 1\ninactive_file 20\nactive_file 300\ntotal_active_file 4000\nodd\nactive_file x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := statSum(path, []string{"inactive_file", "active_file"}); got != 320 {
		t.Errorf("got %d, want 320", got)
	}
	if got := statSum(path+"x", []string{"cache"}); got != 0 {
		t.Errorf("got %d of a file that is not there", got)
	}
}

// A test may have memory, wherever it runs.
func TestHeadroom(t *testing.T) {
	if room := Headroom(""); room < 1<<20 {
		t.Errorf("%d bytes", room)
	}
}
