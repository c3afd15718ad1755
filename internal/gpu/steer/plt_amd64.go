// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// driverLibrary begins the file name of the CUDA driver's library.
const driverLibrary = "libcuda.so"

// maxTable bounds what is read of a library, which is the container's file, in bytes. The driver's
// longest such table has 100 KiB.
const maxTable = 4 << 20

// maxRead bounds all that is read of it, in bytes. A file may say that any of its tables has
// gigabytes, which cost nothing where it has holes.
const maxRead = 16 << 20

// bounded reads of a file until so many bytes have been read.
type bounded struct {
	file io.ReaderAt
	left int64
}

func (b *bounded) ReadAt(p []byte, off int64) (int, error) {
	if b.left -= int64(len(p)); b.left < 0 {
		return 0, fmt.Errorf("more than %d bytes of tables", maxRead)
	}
	return b.file.ReadAt(p, off)
}

// tables are the sections that the names of functions are read from.
var tables = []elf.SectionType{elf.SHT_DYNSYM, elf.SHT_GNU_VERSYM, elf.SHT_GNU_VERNEED, elf.SHT_GNU_VERDEF}

// memcpyPLTEntry finds the word by which a process's CUDA driver calls memcpy, and
// its value: the address of the C library's memcpy, once it was called.
func memcpyPLTEntry(pid int, mem io.ReaderAt) (entry, value uint64, err error) {
	library, ok, err := proc.FindMapping(pid, func(m *proc.Mapping) bool {
		return m.Offset == 0 && strings.HasPrefix(filepath.Base(m.Path), driverLibrary)
	})
	if err != nil {
		return 0, 0, err
	}
	if !ok {
		return 0, 0, fmt.Errorf("it has no %s mapped", driverLibrary)
	}
	// This is the file that is mapped; its name may lead to another one by now.
	file, err := os.Open(fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, library.Start, library.End))
	if err != nil {
		return 0, 0, err
	}
	defer file.Close()
	offset, err := pltEntryIn(file, "memcpy")
	if err != nil {
		return 0, 0, fmt.Errorf("%s: %w", library.Path, err)
	}
	entry = library.Start + offset
	at, ok, err := proc.FindMapping(pid, func(m *proc.Mapping) bool { return entry >= m.Start && entry < m.End && m.End-entry >= 8 })
	if err != nil {
		return 0, 0, err
	}
	if !ok || entry%8 != 0 || !strings.HasPrefix(at.Permissions, "rw") {
		return 0, 0, fmt.Errorf("%s: its pointer to memcpy, at %#x, cannot be written", library.Path, entry)
	}
	word := make([]byte, 8)
	if _, err := mem.ReadAt(word, int64(entry)); err != nil {
		return 0, 0, fmt.Errorf("read its pointer to memcpy: %w", err)
	}
	value = binary.LittleEndian.Uint64(word)
	// Not called yet, it points into the library itself.
	to, ok, err := proc.FindMapping(pid, func(m *proc.Mapping) bool { return value >= m.Start && value < m.End })
	if err != nil {
		return 0, 0, err
	}
	if !ok || !strings.HasPrefix(to.Permissions, "r-x") || to.Path == library.Path {
		return 0, 0, fmt.Errorf("%s: its pointer to memcpy, %#x, is to no function of another library", library.Path, value)
	}
	return entry, value, nil
}

// pltEntryIn returns the place, from where a library's file begins in memory, of the word by which
// it calls a function of another: a relocation R_X86_64_JMP_SLOT (System V ABI for AMD64, 4.4).
func pltEntryIn(file io.ReaderAt, function string) (uint64, error) {
	f, err := elf.NewFile(&bounded{file: file, left: maxRead})
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if f.Machine != elf.EM_X86_64 || f.Type != elf.ET_DYN {
		return 0, fmt.Errorf("not a library for this processor: %v, %v", f.Type, f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD && p.Off == 0 && p.Vaddr != 0 {
			return 0, fmt.Errorf("is to be loaded at %#x", p.Vaddr)
		}
	}
	calls := f.Section(".rela.plt")
	if calls == nil {
		return 0, errors.New("it has no table of calls")
	}
	for _, s := range f.Sections {
		named := s.Type == elf.SHT_DYNSYM && int(s.Link) < len(f.Sections) && f.Sections[s.Link].Size > maxTable
		if named || s.Size > maxTable && (s == calls || slices.Contains(tables, s.Type)) {
			return 0, fmt.Errorf("its tables of calls and their names have more than %d bytes", maxTable)
		}
	}
	table, err := calls.Data()
	if err != nil {
		return 0, err
	}
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return 0, err
	}
	var call elf.Rela64
	for r := bytes.NewReader(table); r.Len() >= binary.Size(call); {
		if err := binary.Read(r, binary.LittleEndian, &call); err != nil {
			return 0, err
		}
		// The table of symbols begins with one that is none.
		i := int(elf.R_SYM64(call.Info)) - 1
		if elf.R_X86_64(elf.R_TYPE64(call.Info)) == elf.R_X86_64_JMP_SLOT && i >= 0 && i < len(symbols) && symbols[i].Name == function {
			return call.Off, nil
		}
	}
	return 0, fmt.Errorf("it does not call %s", function)
}
