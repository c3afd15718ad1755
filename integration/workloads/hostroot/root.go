// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostroot

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// ImageName is the name of the image that the containers are made of, and ProgramsDir is where it
// holds the programs.
const (
	ImageName   = "gpuckpt.test/python:latest"
	ProgramsDir = "/srv/gpuckpt"
)

// systemDirs are those at the root that are links into /usr on most systems, and
// directories of their own on some.
var systemDirs = []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"}

// Root is a container's root of the host's directories: what of them is
// mounted, and what the image reproduces.
type Root struct {
	// links are those at the root, such as lib → usr/lib.
	links map[string]string
	// Mounts are the host's directories at their own paths, read-only. The
	// host's mounts below them are mounts of their own: CRIU is told of those
	// in the spec and of no others, so none may come along unnamed.
	Mounts []specs.Mount
}

// New makes one of the system's directories, a Python's, and the driver's of a real GPU.
func New(python *Python, gpu harness.GPU) (Root, error) {
	dirs := slices.Clone(python.Directories)
	if library := os.Getenv(EnvZMQ); library != "" {
		dirs = append(dirs, filepath.Dir(library))
	}
	if gpu.Kind == harness.RealGPU {
		dirs = append(dirs, driverDir(gpu))
	}
	root := Root{links: map[string]string{}}
	wanted := []string{"/usr"}
	for _, name := range systemDirs {
		info, err := os.Lstat("/" + name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return Root{}, fmt.Errorf("make the container's root: %w", err)
		case info.Mode()&fs.ModeSymlink == 0:
			wanted = append(wanted, "/"+name)
		default:
			if root.links[name], err = os.Readlink("/" + name); err != nil {
				return Root{}, fmt.Errorf("make the container's root: %w", err)
			}
		}
	}
	for _, dir := range dirs {
		real, err := filepath.EvalSymlinks(dir)
		if err != nil {
			return Root{}, fmt.Errorf("make the container's root: %w", err)
		}
		wanted = append(wanted, real)
		// A path through a link of the image's is there already.
		if first, _, _ := strings.Cut(dir[1:], "/"); root.links[first] == "" {
			wanted = append(wanted, dir)
		}
	}
	slices.Sort(wanted)
	var points []string
	for _, dir := range wanted {
		if !slices.ContainsFunc(points, func(point string) bool { return beneath(dir, point) }) {
			points = append(points, dir)
		}
	}
	infos, err := mountinfo.GetMounts(func(info *mountinfo.Info) (skip, stop bool) {
		return !slices.ContainsFunc(points, func(point string) bool {
			return info.Mountpoint != point && beneath(info.Mountpoint, point)
		}), false
	})
	if err != nil {
		return Root{}, fmt.Errorf("make the container's root: list the host's mounts: %w", err)
	}
	// XLA runs CUDA's assembler; Debian's link from /usr/local/cuda leads through this directory.
	if info, err := os.Stat(alternatives); err == nil && info.IsDir() {
		points = append(points, alternatives)
	}
	for _, info := range infos { // the outer come before the inner
		points = append(points, info.Mountpoint)
	}
	for i, point := range points {
		if !slices.Contains(points[:i], point) {
			root.Mounts = append(root.Mounts, specs.Mount{
				Type: "bind", Source: point, Destination: point, Options: []string{"bind", "ro", "rprivate"},
			})
		}
	}
	return root, nil
}

const alternatives = "/etc/alternatives"

// driverDir is the directory of libcuda.so.1 and the libraries that belong to it.
func driverDir(gpu harness.GPU) string {
	files := gpu.LibraryFiles()
	at := slices.IndexFunc(files, func(file string) bool { return strings.HasPrefix(filepath.Base(file), "libcuda.so.") })
	return filepath.Dir(files[at]) // no real GPU is found without it
}

// Env is what a program needs in its environment, with the first GPU if cuda is set.
func (p *Python) Env(gpu harness.GPU, cuda bool) []string {
	env := []string{"HOME=/tmp", "USER=root", "PYTHONDONTWRITEBYTECODE=1", "PATH=" + os.Getenv("PATH")}
	if path := os.Getenv("PYTHONPATH"); path != "" {
		env = append(env, "PYTHONPATH="+path)
	}
	if library := os.Getenv(EnvZMQ); library != "" {
		env = append(env, EnvZMQ+"="+library)
	}
	if cuda {
		env = append(env, "LD_LIBRARY_PATH="+driverDir(gpu), "TRITON_LIBCUDA_PATH="+driverDir(gpu), "CUDA_VISIBLE_DEVICES="+gpu.Devices[0].UUID)
	}
	return env
}

// beneath says whether a path is at or below a directory.
func beneath(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

// Image makes the image: the harness's skeleton, the root's links, the
// loader's cache, and the programs. Mount points are made by runc.
func (r Root) Image(ctx context.Context) (v1.Image, error) {
	base, err := harness.BuildImage(ctx, harness.ImageSpec{})
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	cache, err := os.ReadFile("/etc/ld.so.cache")
	if err == nil {
		files["etc/ld.so.cache"] = cache
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("make the image: %w", err)
	}
	err = fs.WalkDir(programs.Sources, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		files[path.Join(ProgramsDir[1:], name)], err = programs.Sources.ReadFile(name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make the image: %w", err)
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, name := range slices.Sorted(maps.Keys(r.links)) {
		header := &tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: r.links[name], Mode: 0o777}
		if err := w.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("make the image: %w", err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(files[name]))}
		if err := w.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("make the image: %w", err)
		}
		if _, err := w.Write(files[name]); err != nil {
			return nil, fmt.Errorf("make the image: %w", err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("make the image: %w", err)
	}
	top, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(layer.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, fmt.Errorf("make the image: %w", err)
	}
	return mutate.AppendLayers(base, top)
}
