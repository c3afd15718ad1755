// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"

	"github.com/gpuckpt/gpuckpt/images/arriving"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// claimed is a layer for which the image's config has the diff_id of another one.
type claimed struct {
	v1.Layer
	of v1.Layer
}

func (c claimed) DiffID() (v1.Hash, error) { return c.of.DiffID() }

// layerOf makes a layer of files.
func layerOf(t *testing.T, files map[string]string) v1.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for at, text := range files {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: at, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return static.NewLayer(b.Bytes(), types.OCIUncompressedLayer)
}

// An image cannot take the place of another one's layers, though its config says that it has them: as
// layers of GPU state, whose bytes come behind.
func TestClaimedLayers(t *testing.T) {
	c, p := withPlugin(t)
	r := serve(t, false)
	program, err := bins.Path("gpuwork")
	if err != nil {
		t.Fatal(err)
	}
	base, err := harness.BuildImage(t.Context(), harness.ImageSpec{Files: map[string]string{"/usr/bin/gpuwork": program}, Guests: gpu.LibraryFiles()})
	if err != nil {
		t.Fatal(err)
	}
	push := func(of string, of0 v1.Image, layers ...mutate.Addendum) string {
		img, err := mutate.Append(mutate.Annotations(of0, map[string]string{"dev.gpuckpt.layer.bytes": "67108864"}).(v1.Image), layers...)
		if err != nil {
			t.Fatal(err)
		}
		ref, err := name.ParseReference(r.ref(of), name.Insecure)
		if err == nil {
			err = remote.Write(ref, img, remote.WithContext(t.Context()))
		}
		if err != nil {
			t.Fatal(err)
		}
		return r.ref(of)
	}
	pull := func(ref string) error {
		_, err := c.Ctr(t.Context(), "images", "pull", "--plain-http", "--snapshotter", "gpuckpt", ref)
		return err
	}
	of := func(kind string, l v1.Layer) mutate.Addendum {
		return mutate.Addendum{Layer: l, Annotations: map[string]string{"dev.gpuckpt.layer": kind, "dev.gpuckpt.area": "gpu-1-0", "dev.gpuckpt.offset": "0"}}
	}
	criu := layerOf(t, map[string]string{".gpuckpt/gpuckpt.json": "{}"})
	id, err := criu.DiffID()
	if err != nil {
		t.Fatal(err)
	}
	for i, attack := range []struct {
		name     string
		anchored bool
		says     string // of the attacker's pull
	}{{name: "alone", says: "wrong diff id"}, {name: "with an anchor", anchored: true}} {
		t.Run(attack.name, func(t *testing.T) {
			policy := layerOf(t, map[string]string{"etc/policy": "deny " + attack.name})
			junk := claimed{layerOf(t, map[string]string{"x": "y"}), policy}
			layers := []mutate.Addendum{of("gpu", junk), of("criu", criu)}
			if attack.anchored {
				claims, err := junk.DiffID()
				if err != nil {
					t.Fatal(err)
				}
				data, err := oci.Anchor(64<<20, []oci.Layer{
					{Kind: oci.LayerGPU, DiffID: digest.Digest(claims.String()), Area: "gpu-1-0"}, {Kind: oci.LayerCRIU, DiffID: digest.Digest(id.String())},
				})
				if err != nil {
					t.Fatal(err)
				}
				layers = slices.Insert(layers, 0, of("anchor", static.NewLayer(data, types.OCIUncompressedLayer)))
			}
			err := pull(push(fmt.Sprintf("attacker:%d", i), base, layers...))
			if attack.says != "" {
				harness.Says(t, err, attack.says)
			} else if err != nil {
				t.Fatal(err) // whose bytes are fetched behind it
			}
			victim := push(fmt.Sprintf("victim:%d", i), base, mutate.Addendum{Layer: policy})
			if err := pull(victim); err != nil {
				t.Fatal(err)
			}
			for _, runtime := range []string{harness.RuncRuntime, harness.Runtime} {
				k := c.Work(t, harness.RunSpec{ID: fmt.Sprintf("victim-%d-%d", i, len(runtime)), Runtime: runtime, Image: victim, Args: []string{"gpuwork", "sleep"}})
				text, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/etc/policy", k.MustPid(t)))
				if err != nil || string(text) != "deny "+attack.name {
					t.Errorf("%s: the policy is %q, %v\n%s", runtime, text, err, p.said())
				}
				k.MustRemove(t)
			}
		})
	}
}

// An image that has a layer of GPU state of another one's, cut in another way, has it by itself: the other one is
// restored after it, out of what is in containerd then.
func TestAnotherCut(t *testing.T) {
	r := sent(t)
	ref, err := name.ParseReference(r.name, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	img, err := remote.Image(ref, remote.WithContext(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	size, err := strconv.Atoi(manifest.Annotations["dev.gpuckpt.layer.bytes"])
	if err != nil {
		t.Fatal(err)
	}
	config.RootFS.DiffIDs, config.History = nil, nil
	other, err := mutate.ConfigFile(mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1), config)
	if err != nil {
		t.Fatal(err)
	}
	other = mutate.Annotations(other, map[string]string{"dev.gpuckpt.layer.bytes": fmt.Sprint(2 * size)}).(v1.Image)
	var taken []mutate.Addendum
	for i, l := range layers {
		of := manifest.Layers[i].Annotations
		taken = append(taken, mutate.Addendum{Layer: l, Annotations: of, MediaType: manifest.Layers[i].MediaType})
		if of["dev.gpuckpt.layer"] == "gpu" {
			break
		}
	}
	criu := mutate.Addendum{Layer: layerOf(t, map[string]string{".gpuckpt/gpuckpt.json": "{}"}), Annotations: map[string]string{"dev.gpuckpt.layer": "criu"}}
	if other, err = mutate.Append(other, append(taken, criu)...); err != nil {
		t.Fatal(err)
	}
	if ref, err = name.ParseReference(r.ref("attacker:1"), name.Insecure); err == nil {
		err = remote.Write(ref, other, remote.WithContext(t.Context()))
	}
	if err != nil {
		t.Fatal(err)
	}
	// As `gpuckpt restore --pull` fetches what its container runs from.
	from, err := registry.Open(t.Context(), ref.String(), "pull", registry.Options{})
	if err != nil {
		t.Fatal(err)
	}
	i, err := arriving.Begin(t.Context(), r.c.Client(), from, r.c.Snapshotter())
	switch {
	case err == nil:
		t.Log("it arrives as it says")
		if err := errors.Join(i.Finish(), i.Close()); err != nil {
			t.Fatal(err)
		}
	case errors.Is(err, arriving.ErrWhole):
		gpuckpt(t, r.c, "image", "pull", ref.String(), "--snapshotter", r.c.Snapshotter())
	default:
		t.Fatal(err)
	}
	for _, id := range []string{"pulled", "unpacked"} {
		gpuckpt(t, r.c, r.args(id)...)
		r.goesOn(t, id)
	}
}

// What a snapshot takes is counted in its own directory, whatever the labels of an image say.
func TestUsageByLabel(t *testing.T) {
	c, p := withPlugin(t)
	r := serve(t, false)
	host := t.TempDir()
	const size = 32 << 20
	if err := os.WriteFile(filepath.Join(host, "file"), bytes.Repeat([]byte{1}, size), 0o600); err != nil {
		t.Fatal(err)
	}
	img, err := harness.BuildImage(t.Context(), harness.ImageSpec{})
	if err == nil {
		img, err = mutate.Append(img, mutate.Addendum{
			Layer:       layerOf(t, map[string]string{"x": "y"}),
			Annotations: map[string]string{"containerd.io/snapshot/dev.gpuckpt.root": p.root() + strings.Repeat("/..", 20) + host},
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(r.ref("usage:1"), name.Insecure)
	if err == nil {
		err = remote.Write(ref, img, remote.WithContext(t.Context()))
	}
	if err == nil {
		_, err = c.Ctr(t.Context(), "images", "pull", "--plain-http", "--snapshotter", "gpuckpt", ref.String())
	}
	if err != nil {
		t.Fatal(err)
	}
	shots, seen := c.Client().SnapshotService("gpuckpt"), 0
	err = shots.Walk(t.Context(), func(ctx context.Context, i snapshots.Info) error {
		seen++
		u, err := shots.Usage(ctx, i.Name)
		if u.Size >= size {
			t.Errorf("%s takes %d bytes", i.Name, u.Size)
		}
		return err
	})
	if err != nil || seen < 2 {
		t.Errorf("%d snapshots: %v", seen, err)
	}
}
