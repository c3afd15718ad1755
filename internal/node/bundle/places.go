// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/cdi"
)

// RootOf returns where a container's root file system is mounted on the host, by its bundle.
func RootOf(dir string, spec *specs.Spec) string {
	if spec.Root == nil || spec.Root.Path == "" {
		return filepath.Join(dir, "rootfs")
	}
	if filepath.IsAbs(spec.Root.Path) {
		return spec.Root.Path
	}
	return filepath.Join(dir, spec.Root.Path)
}

// Outside is a mount from outside whose place runc does not tell CRIU.
type Outside struct{ Place, Key, Source string }

// AtPlaces returns a copy of a spec in which each path is where runc mounts it: clean, and without
// a symbolic link on its way. Almost every image has links on the way to mounts, such as /var/run.
// They are followed in the root file system, which is at rootfs on the host, and in what earlier
// mounts of the spec bind, and never out of the container.
func AtPlaces(spec *specs.Spec, rootfs string) (*specs.Spec, []Outside) {
	p, at, linux := &places{rootfs: filepath.Clean(rootfs)}, *spec, specs.Linux{}
	if spec.Linux != nil {
		linux = *spec.Linux
		at.Linux = &linux
	}
	for _, m := range spec.Mounts {
		runcs := p.ofRunc(m.Destination)
		m.Destination = p.of(m.Destination)
		if cdi.IsBind(m) && m.Destination != runcs {
			p.outside = append(p.outside, Outside{m.Destination, m.Destination, m.Source})
		}
		p.mounts = append(p.mounts, m)
	}
	at.Mounts = p.mounts
	linux.Devices = slices.Clone(linux.Devices)
	for i := range linux.Devices {
		d := &linux.Devices[i]
		if d.Path == "" { // only for the cgroup
			continue
		}
		runcs, source := p.ofRunc(d.Path), d.Path
		d.Path = path.Join(p.of(path.Dir(path.Clean("/"+d.Path))), path.Base(d.Path))
		if d.Path != runcs {
			p.outside = append(p.outside, Outside{d.Path, d.Path, source})
		}
	}
	linux.ReadonlyPaths, linux.MaskedPaths = slices.Clone(linux.ReadonlyPaths), slices.Clone(linux.MaskedPaths)
	for i, name := range linux.ReadonlyPaths {
		linux.ReadonlyPaths[i] = p.of(name)
	}
	for i, name := range linux.MaskedPaths {
		place := p.of(name)
		linux.MaskedPaths[i] = place
		if st, err := os.Stat(p.below(p.rootfs + place)); err == nil && !st.IsDir() && place != name {
			p.outside = append(p.outside, Outside{place, "/dev/null", "/dev/null"})
		}
	}
	return &at, p.outside
}

// places is what securejoin sees of a container's files when runc mounts something there.
type places struct {
	rootfs  string
	mounts  []specs.Mount // at their places
	outside []Outside
}

// of returns the place of a path in the container. The path is returned where there is none, as of a
// link to itself: runc mounts nothing there.
func (p *places) of(name string) string { return p.join(path.Clean("/"+name), p) }

// ofRunc returns the place that runc tells CRIU: it looks at the root file system alone
// (addCriuDumpMount and addCriuRestoreMount in runc's criu_linux.go).
func (p *places) ofRunc(name string) string { return p.join(name, nil) }

func (p *places) join(name string, files securejoin.VFS) string {
	at, err := securejoin.SecureJoinVFS(p.rootfs, name, files)
	if err != nil {
		return path.Clean("/" + name)
	}
	return path.Clean("/" + strings.TrimPrefix(at, p.rootfs))
}

// below returns where a file of the container is on the host; "" where there is none when runc
// mounts something.
func (p *places) below(name string) string {
	at := path.Clean("/" + strings.TrimPrefix(name, p.rootfs))
	for _, m := range slices.Backward(p.mounts) {
		rest, on := strings.CutPrefix(at+"/", strings.TrimSuffix(m.Destination, "/")+"/")
		switch {
		case !on || slices.Contains(m.Options, "tmpcopyup"):
		case cdi.IsBind(m) && rest != "":
			return path.Join(m.Source, rest)
		default:
			return ""
		}
	}
	return name
}

// Lstat is for securejoin.
func (p *places) Lstat(name string) (os.FileInfo, error) { return os.Lstat(p.below(name)) }

// Readlink is for securejoin.
func (p *places) Readlink(name string) (string, error) { return os.Readlink(p.below(name)) }
