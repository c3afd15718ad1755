// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// linked are the files that a dynamic program needs to start.
type linked struct {
	// loader is the program interpreter's name, as the program has it; empty
	// for a static program and for a library.
	loader string
	// libraries are the host's paths of the shared libraries.
	libraries []string
}

// link asks the loader which libraries a program or shared library needs, those
// needed indirectly among them (ldd). Libraries that cannot be found are an
// error.
func link(ctx context.Context, file string) (linked, error) {
	f, err := elf.Open(file)
	if err != nil {
		return linked{}, fmt.Errorf("read the program %s: %w", file, err)
	}
	defer f.Close()
	needed, err := f.ImportedLibraries()
	if err != nil {
		return linked{}, fmt.Errorf("read the program %s: %w", file, err)
	}
	if len(needed) == 0 {
		return linked{}, nil
	}
	var l linked
	for _, prog := range f.Progs {
		if prog.Type != elf.PT_INTERP {
			continue
		}
		name := make([]byte, prog.Filesz)
		if _, err := prog.ReadAt(name, 0); err != nil {
			return linked{}, fmt.Errorf("read the program %s: %w", file, err)
		}
		l.loader = strings.TrimRight(string(name), "\x00")
	}
	out, err := exec.CommandContext(ctx, "ldd", file).Output()
	if err != nil {
		return linked{}, fmt.Errorf("find the libraries of %s: ldd: %w", file, err)
	}
	for line := range strings.Lines(string(out)) {
		// "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)"
		name, path, ok := strings.Cut(strings.TrimSpace(line), " => ")
		if !ok {
			continue // the kernel's own, and the loader
		}
		path, _, _ = strings.Cut(path, " (")
		if !filepath.IsAbs(path) {
			return linked{}, fmt.Errorf("find the libraries of %s: %s %s: %w", file, name, path, os.ErrNotExist)
		}
		l.libraries = append(l.libraries, path)
	}
	return l, nil
}
