// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// shellImage is an image of the host's shell, a dynamic program everywhere.
func shellImage(t *testing.T) v1.Image {
	t.Helper()
	img, err := BuildImage(t.Context(), ImageSpec{
		Files: map[string]string{"/usr/bin/sh": "/bin/sh"}, Entrypoint: []string{"/usr/bin/sh"}, Env: []string{"A=b"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// readTar returns the headers of an archive by name, and the contents.
func readTar(t *testing.T, r io.Reader) (map[string]*tar.Header, map[string][]byte) {
	t.Helper()
	headers, contents := map[string]*tar.Header{}, map[string][]byte{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return headers, contents
		}
		if err != nil {
			t.Fatal(err)
		}
		if contents[h.Name], err = io.ReadAll(tr); err != nil {
			t.Fatal(err)
		}
		headers[h.Name] = h
	}
}

func TestBuildImage(t *testing.T) {
	img := shellImage(t)
	if media, err := img.MediaType(); media != types.OCIManifestSchema1 || err != nil {
		t.Errorf("media type %s, error %v", media, err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.OS != "linux" || !slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/sh"}) || !slices.Contains(config.Config.Env, "A=b") {
		t.Errorf("config %+v", config)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, error %v", len(layers), err)
	}
	if err := validate.Layer(layers[0]); err != nil {
		t.Error(err)
	}
	data, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	headers, _ := readTar(t, data)
	l, err := link(t.Context(), "/bin/sh")
	if err != nil || l.loader == "" || len(l.libraries) == 0 {
		t.Fatalf("the shell is linked to %+v, error %v", l, err)
	}
	for _, file := range append(l.libraries, l.loader) {
		dir, err := filepath.EvalSymlinks(filepath.Dir(file))
		if err != nil {
			t.Fatal(err)
		}
		if name := filepath.Join(dir, filepath.Base(file))[1:]; headers[name] == nil || headers[name].Size == 0 {
			t.Errorf("the layer lacks %s", name)
		}
	}
	for name, want := range map[string]tar.Header{
		"tmp/":       {Typeflag: tar.TypeDir, Mode: 0o1777},
		"usr/bin/":   {Typeflag: tar.TypeDir, Mode: 0o755},
		"usr/bin/sh": {Typeflag: tar.TypeReg, Mode: 0o755},
		"etc/passwd": {Typeflag: tar.TypeReg, Mode: 0o644},
		"lib":        {Typeflag: tar.TypeSymlink, Mode: 0o777, Linkname: "usr/lib"},
	} {
		got := headers[name]
		if got == nil || got.Typeflag != want.Typeflag || got.Mode != want.Mode || got.Linkname != want.Linkname {
			t.Errorf("%s is %+v, want %+v", name, got, want)
		}
	}
	again, err := shellImage(t).Digest()
	if err != nil {
		t.Fatal(err)
	}
	if first, err := img.Digest(); first != again || err != nil {
		t.Errorf("digests %s and %s of the same files, error %v", first, again, err)
	}
}

func TestWriteArchive(t *testing.T) {
	img := shellImage(t)
	var buf bytes.Buffer
	if err := WriteArchive(&buf, "gpuckpt.test/shell:1", img); err != nil {
		t.Fatal(err)
	}
	_, contents := readTar(t, &buf)
	index, err := v1.ParseIndexManifest(bytes.NewReader(contents["index.json"]))
	if err != nil || len(index.Manifests) != 1 {
		t.Fatalf("index %+v, error %v", index, err)
	}
	if name := index.Manifests[0].Annotations["io.containerd.image.name"]; name != "gpuckpt.test/shell:1" {
		t.Errorf("the archive's image is named %q", name)
	}
	blobs := 0
	for _, name := range slices.Sorted(maps.Keys(contents)) {
		digest, ok := strings.CutPrefix(name, "blobs/sha256/")
		if !ok {
			continue
		}
		blobs++
		if got, _, err := v1.SHA256(bytes.NewReader(contents[name])); got.Hex != digest || err != nil {
			t.Errorf("blob %s has the digest %s, error %v", digest, got.Hex, err)
		}
	}
	if blobs != 3 {
		t.Errorf("%d blobs, want manifest, config and layer", blobs)
	}
}

func TestLinkRefused(t *testing.T) {
	if _, err := link(t.Context(), "/etc/passwd"); err == nil {
		t.Error("a text file was linked")
	}
	if _, err := BuildImage(t.Context(), ImageSpec{Files: map[string]string{"/x": "/no/such/program"}}); err == nil {
		t.Error("an image was made of a missing program")
	}
}
