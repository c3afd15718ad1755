// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// documents describe an image, as JSON: anybody may write them.
type documents struct{ Index, Manifest, Config map[string]any }

// sent is an image as a registry or an archive has it. What it lacks of the blobs is the good image's.
type sent struct {
	Top   ocispec.Descriptor
	Blobs map[digest.Digest][]byte
}

// picture is a checkpoint image that is changed.
type picture struct {
	documents
	blobs map[digest.Digest][]byte
	name  string // of another image, with this digest
	other digest.Digest
}

// newPicture reads a checkpoint image of a containerd.
func newPicture(t *testing.T, c *harness.Containerd, name string) *picture {
	t.Helper()
	p := &picture{blobs: make(map[digest.Digest][]byte), name: harness.WorkloadImage}
	read := func(d ocispec.Descriptor) []byte {
		data, err := content.ReadBlob(t.Context(), c.Client().ContentStore(), d)
		if err != nil {
			t.Fatal(err)
		}
		p.blobs[d.Digest] = data
		return data
	}
	image, err := c.Client().ImageService().Get(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	other, err := c.Client().ImageService().Get(t.Context(), p.name)
	if err != nil {
		t.Fatal(err)
	}
	p.other = other.Target.Digest
	var m ocispec.Manifest
	manifest := read(image.Target)
	if err := json.Unmarshal(manifest, &m); err != nil {
		t.Fatal(err)
	}
	for _, l := range m.Layers {
		read(l)
	}
	index := ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Annotations: map[string]string{"org.example": "x"},
		Manifests: []ocispec.Descriptor{{
			MediaType: image.Target.MediaType, Digest: image.Target.Digest, Size: image.Target.Size,
			Platform: &ocispec.Platform{Architecture: "amd64", OS: "linux"},
		}},
	}
	p.Index, p.Manifest, p.Config = decoded(encoded(index)), decoded(manifest), decoded(read(m.Config))
	return p
}

func encoded(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // it was decoded from JSON, or is made here
	}
	return data
}

func decoded(data []byte) (v map[string]any) {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		panic(err)
	}
	return v
}

// spot is where a value is in a document: names of fields and numbers in lists.
type spot []any

func (s spot) String() string {
	var text strings.Builder
	for _, step := range s {
		fmt.Fprintf(&text, "/%v", step)
	}
	return text.String()
}

// spots are all values of a document. Of long lists that only describe, the first is enough.
func spots(v any, at spot) (all []spot) {
	if len(at) > 1 {
		all = append(all, at)
	}
	switch v := v.(type) {
	case map[string]any:
		for name, child := range v {
			all = append(all, spots(child, append(slices.Clone(at), name))...)
		}
	case []any:
		for n, child := range v {
			if last, _ := at[len(at)-1].(string); n == 0 || last == "layers" || last == "diff_ids" {
				all = append(all, spots(child, append(slices.Clone(at), n))...)
			}
		}
	}
	return all
}

// more are fields that the good image does not have.
func more(m map[string]any) (all []spot) {
	of := []spot{{"Index", "manifests", 0}}
	for _, n := range []int{0, len(m["layers"].([]any)) - 1} { // the base image's, and GPU state
		of = append(of, spot{"Manifest", "layers", n})
	}
	for _, at := range of {
		for _, name := range []string{"urls", "data", "artifactType", "platform"} {
			all = append(all, append(slices.Clone(at), name))
		}
		for _, name := range []string{
			"containerd.io/snapshot.ref", "containerd.io/snapshot/cri.image-ref", "containerd.io/snapshot/cri.manifest-digest", "containerd.io/snapshot/uidmapping",
			"containerd.io/gc.root", "containerd.io/distribution.source.example.com", "io.containerd.manifest.subject", "io.containerd.image.name",
			ocispec.AnnotationRefName, "org.opencontainers.image.enc.keys.jwe", "org.opencontainers.image.enc.pubopts", annotations.Layer, annotations.Area, annotations.Offset,
		} {
			all = append(all, append(slices.Clone(at), "annotations", name))
		}
	}
	for _, name := range []string{"subject", "artifactType"} {
		all = append(all, spot{"Index", name}, spot{"Manifest", name})
	}
	for _, name := range []string{"containerd.io/restart.status", "containerd.io/restart.loguri", "containerd.io/gc.ref.snapshot.overlayfs", "io.cri-containerd.kind", "nerdctl/state-dir"} {
		all = append(all, spot{"Config", "config", "Labels", name})
	}
	for _, name := range []string{"User", "WorkingDir", "StopSignal", "Volumes", "Entrypoint"} {
		all = append(all, spot{"Config", "config", name})
	}
	return all
}

// value is a hostile value.
type value struct {
	kind string
	is   any
}

// absent has a field removed.
type absent struct{}

// values are those for the place of a good value, nil for none.
func (p *picture) values(at spot, good any, paths []string) (all []value) {
	add := func(kind string, is any) { all = append(all, value{kind, is}) }
	add("missing", absent{})
	add("null", nil)
	add("a list", []any{})
	switch good.(type) {
	case json.Number:
		add("text", "x")
		for _, n := range []int64{-1, 0, 1, 1 << 31, 1 << 46, math.MaxInt64} {
			add(fmt.Sprintf("number %d", n), n)
		}
		add("beyond numbers", json.Number("1e300"))
		return all
	case map[string]any, []any:
		add("text", "x")
		return all
	}
	name, _ := at[len(at)-1].(string)
	add("empty", "")
	add("NUL", "a\x00b")
	add("lines", "a\nb\t\x1b[2J\r$ c")
	add("long", strings.Repeat("gpu-1-0/", 30000))
	add("another image", p.name)
	add("a name of ours", "gpuckpt.invalid/x:1")
	for n, path := range paths {
		add(fmt.Sprintf("path %d", n), path)
		if name == annotations.Area {
			add(fmt.Sprintf("an area at path %d", n), strings.TrimSuffix(path, "canary")+"gpu-1-0")
		}
	}
	switch text, _ := good.(string); {
	case strings.HasPrefix(text, "sha256:"), strings.Contains(name, "digest"), strings.Contains(name, "snapshot"):
		for kind, d := range map[string]string{
			"another image's": p.other.String(), "its manifest's": digest.FromBytes(encoded(p.Manifest)).String(), "nobody's": "sha256:" + strings.Repeat("0", 64),
			"leads out": "sha256:../../../../index.json", "sha512": "sha512:" + strings.Repeat("0", 128), "of no kind": "blake3:00", "no colon": "x", "too short": "sha256:00",
		} {
			add(kind, d)
		}
	case name == "mediaType" || name == "artifactType":
		for _, kind := range []string{
			ocispec.MediaTypeImageIndex, ocispec.MediaTypeImageManifest, ocispec.MediaTypeImageConfig, ocispec.MediaTypeImageLayer, ocispec.MediaTypeImageLayerGzip,
			ocispec.MediaTypeImageLayer + "+encrypted", ocispec.MediaTypeImageLayerNonDistributable, "application/vnd.docker.distribution.manifest.v1+prettyjws", //nolint:staticcheck // others use it
			"application/vnd.containerd.container.criu.checkpoint.criu.tar", oci.MediaTypeGPU, "application/vnd.in-toto+json",
		} {
			add(kind, kind)
		}
	case name == annotations.Layer:
		for _, kind := range []string{oci.LayerGPU, oci.LayerMemory, oci.LayerCRIU, oci.LayerRW, oci.LayerIndex, oci.LayerBase} {
			add("kind "+kind, kind)
		}
	case strings.Contains(name, "restart"):
		add("a program", "binary:///bin/touch?"+paths[0]+".made")
		add("running", "running")
	}
	if text, _ := good.(string); name == annotations.Area {
		add("another area", "gpu-9-9")
		add("digits", "gpu-1-"+strings.Repeat("1", 300))
	} else if _, err := strconv.ParseUint(text, 10, 64); err == nil || name == annotations.Offset {
		for _, n := range []string{"-1", "0", "1", "67108864", "134217728", "1099511627776", "4611686018427387904", "9223372036854775808", "18446744073709551615"} {
			add("number "+n, n)
		}
	}
	return all
}

// each has do try every change of the image.
func (p *picture) each(paths []string, do func(field, kind string, made func() sent)) {
	var all []spot
	for name, document := range map[string]map[string]any{"Index": p.Index, "Manifest": p.Manifest, "Config": p.Config} {
		all = append(all, spots(document, spot{name})...)
	}
	there := make(map[string]bool)
	for _, at := range all {
		there[at.String()] = true
	}
	all = append(all, slices.DeleteFunc(more(p.Manifest), func(at spot) bool { return there[at.String()] })...)
	slices.SortFunc(all, func(a, b spot) int { return strings.Compare(a.String(), b.String()) })
	for _, at := range all {
		good := p.at(at)
		values := p.values(at, good, paths)
		slices.SortFunc(values, func(a, b value) int { return strings.Compare(a.kind, b.kind) })
		for _, v := range values {
			if good == nil && v.is == (absent{}) {
				continue
			}
			do(at.String(), v.kind, func() sent { return p.with(at, v.is) })
		}
	}
}

// at returns what is at a place, nil for nothing.
func (p *picture) at(at spot) any {
	v := any(decoded(encoded(p.documents)))
	for _, step := range at {
		switch step := step.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[step]
		case int:
			v = v.([]any)[step]
		}
	}
	return v
}

// set sets a value in a document, and makes what leads to it.
func set(in any, at spot, is any) any {
	if len(at) == 0 {
		return is
	}
	if n, ok := at[0].(int); ok {
		list := in.([]any)
		if list[n] = set(list[n], at[1:], is); list[n] == (absent{}) {
			list = slices.Delete(list, n, n+1)
		}
		return list
	}
	m, _ := in.(map[string]any)
	if m == nil {
		m = make(map[string]any)
	}
	name := at[0].(string)
	if m[name] = set(m[name], at[1:], is); m[name] == (absent{}) {
		delete(m, name)
	}
	return m
}

// with returns the image with a change. All that follows from it is as it should be: digests and sizes. So it is the changed value that is refused.
func (p *picture) with(at spot, is any) (made sent) {
	all := set(any(decoded(encoded(p.documents))), at, is).(map[string]any)
	made.Blobs = make(map[digest.Digest][]byte)
	follow := func(is any, to ...any) {
		if len(at) > len(to) || !slices.Equal(at, to[:len(at)]) {
			set(all, to, is)
		}
	}
	put := func(data []byte, of ...any) {
		d := digest.FromBytes(data)
		made.Blobs[d] = data
		follow(d, append(slices.Clone(of), "digest")...)
		follow(len(data), append(slices.Clone(of), "size")...)
	}
	put(encoded(all["Config"]), "Manifest", "config")
	manifest := encoded(all["Manifest"])
	put(manifest, "Index", "manifests", 0)
	top, kind := manifest, ocispec.MediaTypeImageManifest
	if at[0] == "Index" {
		top, kind = encoded(all["Index"]), ocispec.MediaTypeImageIndex
	}
	made.Blobs[digest.FromBytes(top)] = top
	made.Top = ocispec.Descriptor{MediaType: kind, Digest: digest.FromBytes(top), Size: int64(len(top))}
	return made
}
