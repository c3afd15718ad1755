// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oplog

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Several shims write at once, the file is put aside when it is large, and a reader that follows it
// gets every entry once.
func TestFollow(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "logs")
	add := func(name string) {
		if err := Append(dir, Entry{Operation: "checkpoint", Container: name, Error: strings.Repeat("x", 8<<10)}); err != nil {
			t.Error(err)
		}
	}
	add("before")
	tail, err := NewTail(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer tail.Close()
	got := map[string]int{}
	next := func() {
		t.Helper()
		entries, err := tail.Next()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			got[e.Container]++
		}
	}
	const writers, each = 4, 200 // 6.6 MB
	for part := range 2 {
		var all sync.WaitGroup
		for w := range writers {
			all.Go(func() {
				for i := range each / 2 {
					add(fmt.Sprintf("%d-%d-%d", part, w, i))
				}
			})
		}
		all.Wait()
		next()
	}
	if len(got) != writers*each || got["before"] != 0 {
		t.Errorf("%d entries, %d from before", len(got), got["before"])
	}
	for name, n := range got {
		if n != 1 {
			t.Errorf("%s came %d times", name, n)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, Name+".1")); err != nil {
		t.Error(err)
	}
	if all, err := Read(dir); err != nil || len(all) != writers*each+1 {
		t.Errorf("%d entries, %v", len(all), err)
	}
}

// A line that was torn, by a full disk, is passed over; one that is being written is not read yet.
func TestTorn(t *testing.T) {
	dir := t.TempDir()
	text := `{"operation":"checkp` + "\n" + `{"operation":"restore","container":"a"}` + "\n" + `{"operation":"res`
	if err := os.WriteFile(filepath.Join(dir, Name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if all, err := Read(dir); err != nil || len(all) != 1 || all[0].Container != "a" {
		t.Errorf("%+v, %v", all, err)
	}
}
