// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// WorkloadImage is the name of the image that ImportWorkload makes.
const WorkloadImage = "gpuckpt.test/gpuwork:latest"

// ImageSpec says what an image holds beside /etc, /tmp and the like.
type ImageSpec struct {
	// Files are the files by their path in the image, each with the host's
	// path of its content. What they are linked to comes with them.
	Files map[string]string
	// Guests are shared libraries of the host that will be mounted into the
	// containers: what they need comes into the image, they do not.
	Guests []string
	// Entrypoint is the program that containers start, before their arguments.
	Entrypoint []string
	// Env are variables, KEY=value each.
	Env []string
}

// BuildImage makes an OCI image of one layer from files of the host. Shared
// libraries and the loader lie where the host has them, so that the loader's
// built-in search path finds them. The same files give the same digests.
func BuildImage(ctx context.Context, spec ImageSpec) (v1.Image, error) {
	t := newTree()
	for _, dir := range []string{"dev", "etc", "proc", "root", "run/lock", "sys", "tmp", "usr/bin", "usr/lib", "usr/lib64", "usr/sbin", "var/tmp"} {
		t.addDir(dir)
	}
	maps.Copy(t.links, map[string]string{ // Debian's
		"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin",
		"var/run": "/run", "var/lock": "/run/lock", "etc/mtab": "../proc/self/mounts",
	})
	t.text["etc/passwd"] = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\napp:x:1000:1000::/home/app:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
	t.text["etc/group"] = "root:x:0:\nwww-data:x:33:\napp:x:1000:\nmodels:x:4000:app\nnogroup:x:65534:\n"
	t.text["etc/hosts"] = "127.0.0.1 localhost\n"
	t.text["etc/resolv.conf"] = ""
	for name, file := range spec.Files {
		t.files[strings.TrimPrefix(path.Clean("/"+name), "/")] = file
		if err := t.addLinked(ctx, file); err != nil {
			return nil, err
		}
	}
	for _, file := range spec.Guests {
		if err := t.addLinked(ctx, file); err != nil {
			return nil, err
		}
	}
	data, err := t.tar()
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(data)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, fmt.Errorf("make the image's layer: %w", err)
	}
	return imageOf(layer, spec)
}

// ImageOfRoot makes an OCI image of a root file system in an archive, .tar.gz.
func ImageOfRoot(archive string) (v1.Image, error) {
	layer, err := tarball.LayerFromFile(archive, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, fmt.Errorf("make the image's layer: %w", err)
	}
	return imageOf(layer, ImageSpec{})
}

// imageOf makes the image that has a layer.
func imageOf(layer v1.Layer, spec ImageSpec) (_ v1.Image, err error) {
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if img, err = mutate.AppendLayers(img, layer); err != nil {
		return nil, fmt.Errorf("make the image: %w", err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("make the image's config: %w", err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config.Entrypoint = spec.Entrypoint
	config.Config.Env = append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, spec.Env...)
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return nil, fmt.Errorf("make the image's config: %w", err)
	}
	return img, nil
}

// tree is the content of a layer; its paths are relative to the root.
type tree struct {
	dirs  map[string]bool
	links map[string]string // path → target
	text  map[string]string // path → content
	files map[string]string // path → the host's file
}

func newTree() *tree {
	return &tree{dirs: map[string]bool{}, links: map[string]string{}, text: map[string]string{}, files: map[string]string{}}
}

// addDir adds a directory and those above it.
func (t *tree) addDir(dir string) {
	for ; dir != "." && dir != "/"; dir = path.Dir(dir) {
		t.dirs[dir] = true
	}
}

// addLinked adds what a program or library is linked to, each where the host has
// it once symbolic links in its directory are resolved.
func (t *tree) addLinked(ctx context.Context, file string) error {
	l, err := link(ctx, file)
	if err != nil {
		return err
	}
	if l.loader != "" {
		l.libraries = append(l.libraries, l.loader)
	}
	for _, library := range l.libraries {
		dir, err := filepath.EvalSymlinks(filepath.Dir(library))
		if err != nil {
			return fmt.Errorf("find the library %s: %w", library, err)
		}
		t.files[filepath.Join(dir, filepath.Base(library))[1:]] = library
	}
	return nil
}

// tar writes the layer: directories, symbolic links and files in the order of
// their paths, owned by root, dated 1970.
func (t *tree) tar() ([]byte, error) {
	for _, name := range slices.Concat(slices.Collect(maps.Keys(t.text)), slices.Collect(maps.Keys(t.files))) {
		t.addDir(path.Dir(name))
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, dir := range slices.Sorted(maps.Keys(t.dirs)) {
		mode := int64(0o755)
		if path.Base(dir) == "tmp" {
			mode = 0o1777
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: mode}); err != nil {
			return nil, fmt.Errorf("write the image's layer: %w", err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.links)) {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: t.links[name], Mode: 0o777}); err != nil {
			return nil, fmt.Errorf("write the image's layer: %w", err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.text)) {
		if err := writeTarFile(w, name, 0o644, []byte(t.text[name])); err != nil {
			return nil, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.files)) {
		data, err := os.ReadFile(t.files[name])
		if err != nil {
			return nil, fmt.Errorf("write the image's layer: %w", err)
		}
		if err := writeTarFile(w, name, 0o755, data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("write the image's layer: %w", err)
	}
	return buf.Bytes(), nil
}

// writeTarFile writes one regular file.
func writeTarFile(w *tar.Writer, name string, mode int64, data []byte) error {
	header := tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(data))}
	if err := w.WriteHeader(&header); err != nil {
		return fmt.Errorf("write %s into an archive: %w", name, err)
	}
	if _, err := w.Write(data); err != nil {
		return fmt.Errorf("write %s into an archive: %w", name, err)
	}
	return nil
}
