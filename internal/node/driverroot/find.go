// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package driverroot finds the libraries of NVIDIA's driver on a node whose loader does not: in the
// driver container of the GPU Operator, on Container-Optimized OS, or where driver_root says.
package driverroot

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuckpt/gpuckpt/cdi"
)

// Library is the driver library that the CUDA helper loads.
const Library = "libcuda.so.1"

// ErrNotFound is the error of a driver_root without a driver.
var ErrNotFound = errors.New("no NVIDIA driver in driver_root")

// Place is where the driver's libraries are.
type Place struct {
	// Dir has Library. It is empty where the loader of the host finds Library by itself, and where
	// nothing was found.
	Dir string
	// Root is the root that Dir lies in, "" where it is not known.
	Root string
	// From says how Dir was found: "driver_root", "CDI specification", "usual place"; "loader" or
	// "" where Dir is empty.
	From string
}

var (
	// usual are the roots of drivers that are not installed on the host itself: the GPU Operator's,
	// Container-Optimized OS's, Talos's and those of older Kubernetes images.
	usual = []string{"/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "/usr/local/glibc", "/usr/local/nvidia"}
	// below are the directories of libraries in such a root.
	below = []string{"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "lib64", "lib", "."}
	// loaderDirs and loaderCache are where the loader of the host looks.
	loaderDirs  = []string{"/lib64", "/usr/lib64", "/lib", "/usr/lib"}
	loaderCache = "/etc/ld.so.cache"
)

// Find finds the driver. root is driver_root of the configuration, "" to look for it; libraryPath
// is the LD_LIBRARY_PATH of the program that is to load it; specDirs are the directories of CDI
// specifications. A configured root counts alone; then the loader of the host comes first, the CDI
// specifications second, because containers get those very files, and the usual places last.
func Find(root, libraryPath string, specDirs []string) (Place, error) {
	if root != "" {
		if dir := in(root); dir != "" {
			return Place{dir, root, "driver_root"}, nil
		}
		return Place{}, fmt.Errorf("%w: no %s in %s, nor in %s below it", ErrNotFound, Library, root, strings.Join(below[:len(below)-1], ", "))
	}
	if loads(libraryPath) {
		return Place{From: "loader"}, nil
	}
	if registry, err := cdi.Open(specDirs...); err == nil {
		for _, f := range registry.Files() {
			if !strings.HasPrefix(filepath.Base(f.Host), "libcuda.so") {
				continue
			}
			if dir := filepath.Dir(f.Host); has(dir) {
				return Place{Dir: dir, From: "CDI specification"}, nil
			}
		}
	}
	for _, root := range usual {
		if dir := in(root); dir != "" {
			return Place{dir, root, "usual place"}, nil
		}
	}
	return Place{}, nil
}

// in returns the directory of Library below a root, or "".
func in(root string) string {
	for _, dir := range below {
		if dir = filepath.Join(root, dir); has(dir) {
			return dir
		}
	}
	return ""
}

// loads reports whether the loader of the host finds Library.
func loads(libraryPath string) bool {
	if slices.ContainsFunc(append(filepath.SplitList(libraryPath), loaderDirs...), has) {
		return true
	}
	cache, _ := os.ReadFile(loaderCache) // ldconfig(8): the full paths are in it, each ended by a zero
	name := []byte("/" + Library + "\x00")
	for at := bytes.Index(cache, name); at >= 0; at = bytes.Index(cache, name) {
		if dir := cache[bytes.LastIndexByte(cache[:at], 0)+1 : at]; has(string(dir)) {
			return true
		}
		cache = cache[at+len(name):]
	}
	return false
}

// has reports whether a directory has Library, for programs of this word size.
func has(dir string) bool {
	if dir == "" {
		return false
	}
	f, err := elf.Open(filepath.Join(dir, Library))
	if err != nil {
		// What is there and no ELF file fails when it is loaded, with a reason.
		return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission)
	}
	defer f.Close()
	return f.Class == elf.ELFCLASS64
}
