// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"archive/tar"
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/client"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// ImportWorkload makes the image WorkloadImage of the program gpuwork and
// imports it. What the GPU's driver libraries need comes with it.
func (c *Containerd) ImportWorkload(ctx context.Context) error {
	program, err := c.opts.Bins.Path("gpuwork")
	if err != nil {
		return err
	}
	img, err := BuildImage(ctx, ImageSpec{
		Files:      map[string]string{"/usr/bin/gpuwork": program},
		Guests:     c.opts.GPU.LibraryFiles(),
		Entrypoint: []string{"/usr/bin/gpuwork"},
	})
	if err != nil {
		return err
	}
	return c.Import(ctx, WorkloadImage, img)
}

// Import puts an image into the instance under a full name
// ("gpuckpt.test/name:tag") and unpacks it, as a pull would. An image of that
// name is replaced.
func (c *Containerd) Import(ctx context.Context, name string, img v1.Image) error {
	r, w := io.Pipe()
	go func() { w.CloseWithError(WriteArchive(w, name, img)) }()
	images, err := c.client.Import(ctx, r)
	_ = r.Close()
	if err != nil {
		return fmt.Errorf("import the image %s: %w", name, err)
	}
	for _, image := range images {
		if err := client.NewImage(c.client, image).Unpack(ctx, c.snapshotter); err != nil {
			return fmt.Errorf("unpack the image %s: %w", image.Name, err)
		}
	}
	return nil
}

// WriteArchive writes an image as a tar archive of an OCI layout, which "ctr
// image import" reads.
func WriteArchive(w io.Writer, name string, img v1.Image) error {
	desc, err := partial.Descriptor(img)
	if err != nil {
		return fmt.Errorf("write the archive of %s: %w", name, err)
	}
	desc.Annotations = map[string]string{"io.containerd.image.name": name}
	index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{*desc}})
	if err != nil {
		return fmt.Errorf("write the archive of %s: %w", name, err)
	}
	manifest, err := img.RawManifest()
	if err != nil {
		return fmt.Errorf("write the archive of %s: %w", name, err)
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return fmt.Errorf("write the archive of %s: %w", name, err)
	}
	configName, err := img.ConfigName()
	if err != nil {
		return fmt.Errorf("write the archive of %s: %w", name, err)
	}
	layers, err := img.Layers()
	if err != nil {
		return fmt.Errorf("write the archive of %s: %w", name, err)
	}
	t := tar.NewWriter(w)
	for _, f := range []struct {
		name string
		data []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", index},
		{blobPath(desc.Digest), manifest},
		{blobPath(configName), config},
	} {
		if err := writeTarFile(t, f.name, 0o644, f.data); err != nil {
			return err
		}
	}
	for _, layer := range layers {
		if err := writeLayer(t, layer); err != nil {
			return fmt.Errorf("write the archive of %s: %w", name, err)
		}
	}
	return t.Close()
}

// writeLayer writes a layer as the blob it is, without holding it in memory.
func writeLayer(t *tar.Writer, layer v1.Layer) error {
	digest, err := layer.Digest()
	if err != nil {
		return err
	}
	size, err := layer.Size()
	if err != nil {
		return err
	}
	data, err := layer.Compressed()
	if err != nil {
		return err
	}
	defer data.Close()
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: blobPath(digest), Mode: 0o644, Size: size}); err != nil {
		return err
	}
	_, err = io.Copy(t, data)
	return err
}

// blobPath is a blob's place in an OCI layout.
func blobPath(digest v1.Hash) string { return "blobs/" + digest.Algorithm + "/" + digest.Hex }
