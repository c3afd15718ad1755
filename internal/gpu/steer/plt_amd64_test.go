// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
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

// holes is a file that has its beginning and zeros.
type holes struct {
	begin []byte
	read  int64
}

func (h *holes) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	if off < int64(len(h.begin)) {
		copy(p, h.begin[off:])
	}
	h.read += int64(len(p))
	return len(p), nil
}

// A library whose table of names has 2 GiB of holes costs no memory.
func TestLibraryWithHoles(t *testing.T) {
	h := elf.Header64{Type: uint16(elf.ET_DYN), Machine: uint16(elf.EM_X86_64), Version: 1, Shoff: 64, Ehsize: 64, Shentsize: 64, Shnum: 2, Shstrndx: 1}
	copy(h.Ident[:], "\x7fELF\x02\x01\x01")
	var b bytes.Buffer
	for _, part := range []any{h, elf.Section64{}, elf.Section64{Type: uint32(elf.SHT_STRTAB), Off: 4096, Size: 2 << 30}} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	file := &holes{begin: b.Bytes()}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := pltEntryIn(file, "memcpy")
	runtime.ReadMemStats(&after)
	if err == nil || !strings.Contains(err.Error(), "bytes of tables") {
		t.Errorf("error %v", err)
	}
	if used := (after.TotalAlloc - before.TotalAlloc) >> 20; used > 128 || file.read > maxRead {
		t.Errorf("it took %d MiB of memory, and %d bytes were read", used, file.read)
	}
}
