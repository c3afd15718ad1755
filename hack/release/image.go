// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// nodeImage is the image of one architecture.
type nodeImage struct {
	v1.Image
	arch string
}

// image makes the image that installs gpuckpt on the node that it runs on.
func (r release) image(arch string, t tree) (nodeImage, error) {
	var b bytes.Buffer
	if err := r.writeTar(&b, "opt/gpuckpt", t); err != nil {
		return nodeImage{}, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nodeImage{}, err
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nodeImage{}, err
	}
	image, err = mutate.ConfigFile(image, func() *v1.ConfigFile {
		config, cerr := image.ConfigFile()
		if cerr != nil {
			err = cerr
			return nil
		}
		config = config.DeepCopy()
		config.Architecture, config.OS, config.Created = arch, "linux", v1.Time{Time: r.time}
		config.Config = v1.Config{
			Entrypoint: []string{"/opt/gpuckpt/bin/gpuckpt"}, Cmd: []string{"install", "--root", "/host"},
			Labels: map[string]string{"org.opencontainers.image.version": r.version, "org.opencontainers.image.source": homepage, "org.opencontainers.image.licenses": "Apache-2.0"},
		}
		return config
	}())
	return nodeImage{image, arch}, err
}

// layout writes the images as one, an OCI layout in a tar archive: "ctr images import" and
// "skopeo copy oci-archive:" take it.
func (r release) layout(images []nodeImage) (err error) {
	dir, err := os.MkdirTemp("", "gpuckpt-image-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var adds []mutate.IndexAddendum
	for _, i := range images {
		adds = append(adds, mutate.IndexAddendum{Add: i.Image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: i.arch}}})
	}
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), adds...)
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := path.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name": r.imageName(), "org.opencontainers.image.ref.name": r.version,
	})); err != nil {
		return err
	}
	t, err := readTree(dir)
	if err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(r.out, "gpuckpt-node-"+r.version+".oci.tar"))
	if err != nil {
		return err
	}
	return errors.Join(r.writeTar(f, "", t), f.Close())
}

// imageName is the image's name where it is imported.
func (r release) imageName() string { return "ghcr.io/gpuckpt/node:" + r.version }
