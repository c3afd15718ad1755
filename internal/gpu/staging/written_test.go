// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import "testing"

// What the driver has written beyond what is filled is not thrown away; what filling
// itself has left there is zeros.
func TestWrittenBeyond(t *testing.T) {
	f, err := MemoryFile()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const offset, length, from = 64 << 10, 8 << 20, 4 << 20
	if err := f.Truncate(offset + length + PageSize); err != nil {
		t.Fatal(err)
	}
	b := &File{Handle: f, Offset: offset, Length: length}
	for _, w := range []struct {
		what string
		at   int64
		data []byte
		want bool
	}{
		{"nothing", 0, nil, false},
		{"before", from - 1, []byte{1}, false},
		{"behind the area", offset + length, []byte{1}, false},
		{"zeros", from + 2<<20, make([]byte, 3*PageSize), false},
		{"the last byte", offset + length - 1, []byte{1}, true},
		{"the first byte", from, []byte{1}, true},
	} {
		if _, err := f.WriteAt(w.data, w.at); err != nil {
			t.Fatal(err)
		}
		if got, err := b.WrittenBeyond(from); got != w.want || err != nil {
			t.Errorf("%s: %v, %v", w.what, got, err)
		}
	}
}
