// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// blobPath is where a layout has a blob.
func blobPath(dir string, d digest.Digest) string {
	return filepath.Join(dir, "blobs", d.Algorithm().String(), d.Encoded())
}

// refuses fails the test unless Verify finds fault and says so in these words.
func refuses(t *testing.T, l *testLayout, manifest ocispec.Descriptor, kind error, words ...string) {
	t.Helper()
	_, err := Verify(t.Context(), l, manifest, nil)
	if !errors.Is(err, kind) {
		t.Fatalf("got %v, want %v", err, kind)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

// One wrong byte in any blob, a blob cut or gone.
func TestVerifyFindsEveryDamagedBlob(t *testing.T) {
	for _, c := range []Compression{"", Zstd, Gzip, None} {
		t.Run(string(c), func(t *testing.T) {
			store := newLayout(t)
			r := build(t, store, newCheckpoint(t, 0x3000, random(5<<20), random(1<<20)), Options{
				Base: newBase(t, store), Compression: c, RWTar: bytes.NewReader(plainTar(t, map[string]string{"tmp/file": "x"})),
			})
			m, _, err := manifestOf(t.Context(), store, r.Manifest)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range append([]ocispec.Descriptor{r.Manifest, m.Config}, m.Layers...) {
				path := blobPath(store.dir, d.Digest)
				for name, damage := range map[string]func([]byte) []byte{
					"first byte": func(b []byte) []byte { b[0] ^= 1; return b },
					"a byte":     func(b []byte) []byte { b[len(b)/3] ^= 0x10; return b },
					"last byte":  func(b []byte) []byte { b[len(b)-1] ^= 0x80; return b },
					"cut":        func(b []byte) []byte { return b[:len(b)*2/3] },
					"longer":     func(b []byte) []byte { return append(b, 0) },
				} {
					good, err := os.ReadFile(path)
					if err != nil {
						t.Fatal(err)
					}
					if err := os.Chmod(path, 0o600); err != nil {
						t.Fatal(err)
					}
					if err := os.WriteFile(path, damage(bytes.Clone(good)), 0o600); err != nil {
						t.Fatal(err)
					}
					t.Logf("%s of %s", name, d.Digest)
					refuses(t, store, r.Manifest, images.ErrDamaged, d.Digest.String())
					if err := os.WriteFile(path, good, 0o600); err != nil {
						t.Fatal(err)
					}
				}
				if err := os.Rename(path, path+"x"); err != nil {
					t.Fatal(err)
				}
				refuses(t, store, r.Manifest, images.ErrDamaged, d.Digest.String(), "missing")
				if err := os.Rename(path+"x", path); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := Verify(t.Context(), store, r.Manifest, nil); err != nil {
				t.Errorf("mended: %v", err)
			}
		})
	}
}

// Wrong GPU state in an image whose blobs are all as its manifest says.
func TestVerifyNamesTheBlock(t *testing.T) {
	state := make([]byte, 150<<20)
	copy(state, random(len(state)/2)) // the last block is zero but for what is damaged
	for offset, blocks := range map[uint64][]int{0: {1}, 0x5000: {0, 1, 2}} {
		for _, block := range blocks {
			t.Run(fmt.Sprintf("%#x,%d", offset, block), func(t *testing.T) {
				dir := newCheckpoint(t, offset, state)
				f, err := os.OpenFile(filepath.Join(dir, "gpu-1-0"), os.O_RDWR, 0)
				if err != nil {
					t.Fatal(err)
				}
				// The block's last byte: with an offset it is in the next layer.
				at := min(int64(offset)+int64(block+1)*images.BlockBytes, int64(offset)+int64(len(state))) - 1
				if _, err := f.WriteAt([]byte{1}, at); err != nil {
					t.Fatal(err)
				}
				f.Close()
				c, err := images.Open(dir)
				if err != nil {
					t.Fatal(err)
				}
				if err := images.Check(t.Context(), c.Areas(), 0, nil); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), fmt.Sprintf("gpu-1-0 is damaged: block %d ", block)) {
					t.Errorf("directory: %v", err)
				}
				store := newLayout(t)
				r := build(t, store, dir, Options{})
				_, err = Verify(t.Context(), store, r.Manifest, nil)
				var wrong *images.BlockError
				if !errors.As(err, &wrong) || wrong.Area != "gpu-1-0" || wrong.Block != block {
					t.Errorf("image: %v", err)
				}
				if n := strings.Count(err.Error(), "is damaged"); n != 1 {
					t.Errorf("%d blocks are named: %v", n, err)
				}
			})
		}
	}
}

// What says which blobs have the GPU state is what the manifest says.
func TestVerifyComparesTheIndex(t *testing.T) {
	store := newLayout(t)
	r := build(t, store, newCheckpoint(t, 0, random(70<<20)), Options{})
	m, _, err := manifestOf(t.Context(), store, r.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	first, second := images.PieceFile("gpu-1-0", 0), images.PieceFile("gpu-1-0", 64<<20)
	text := map[string]string{}
	for i, name := range []string{first, second} {
		text[images.ImageDir+"/"+name] = images.Pointer{Digest: m.Layers[2+i].Digest, Bytes: uint64(m.Layers[2+i].Size)}.String()
	}
	index := func(edit func(map[string]string)) ocispec.Descriptor {
		files := maps.Clone(text)
		edit(files)
		return replaced(t, store, r.Manifest, LayerIndex, plainTar(t, files))
	}
	if _, err := Verify(t.Context(), store, index(func(map[string]string) {}), nil); err != nil {
		t.Fatal(err)
	}
	for name, edit := range map[string]func(map[string]string){
		"a blob less":    func(f map[string]string) { delete(f, images.ImageDir+"/"+first) },
		"a blob more":    func(f map[string]string) { f[images.ImageDir+"/"+images.PieceFile("gpu-1-0", 2<<20)] = "x" },
		"another blob":   func(f map[string]string) { f[images.ImageDir+"/"+first] = f[images.ImageDir+"/"+second] },
		"something else": func(f map[string]string) { f[images.ImageDir+"/pages-1.img"] = "x" },
		"more behind it": func(f map[string]string) { f[images.ImageDir+"/"+first] += "x" },
	} {
		t.Run(name, func(t *testing.T) { refuses(t, store, index(edit), images.ErrDamaged, "(index, ") })
	}
	config, ids, err := readConfig(t.Context(), store, &m)
	if err != nil {
		t.Fatal(err)
	}
	if config["rootfs"], err = json.Marshal(rootfs(ids[1:])); err != nil {
		t.Fatal(err)
	}
	m.Layers = m.Layers[1:]
	refuses(t, store, rewritten(t, store, m, config), images.ErrDamaged, "no layer says what its blobs have")
}

// replaced gives the manifest of an image one of whose layers has been replaced
// by an archive, with all digests as they should be.
func replaced(t *testing.T, l *testLayout, manifest ocispec.Descriptor, kind string, archive []byte) ocispec.Descriptor {
	t.Helper()
	m, _, err := manifestOf(t.Context(), l, manifest)
	if err != nil {
		t.Fatal(err)
	}
	config, ids, err := readConfig(t.Context(), l, &m)
	if err != nil {
		t.Fatal(err)
	}
	for i, d := range m.Layers {
		if d.Annotations[annotations.Layer] != kind {
			continue
		}
		with := put(t, l, ocispec.MediaTypeImageLayer, archive)
		with.Annotations = d.Annotations
		m.Layers[i], ids[i] = with, with.Digest
		break
	}
	if config["rootfs"], err = json.Marshal(rootfs(ids)); err != nil {
		t.Fatal(err)
	}
	return rewritten(t, l, m, config)
}

func rewritten(t *testing.T, l *testLayout, m ocispec.Manifest, config map[string]json.RawMessage) ocispec.Descriptor {
	t.Helper()
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	m.Config = put(t, l, ocispec.MediaTypeImageConfig, data)
	if data, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	return put(t, l, ocispec.MediaTypeImageManifest, data)
}

// archiveOf packs entries as they are.
func archiveOf(t *testing.T, entries ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		body := make([]byte, h.Size)
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// hostile are archives that no build makes.
func hostile() map[string]*tar.Header {
	return map[string]*tar.Header{
		"parent":         {Name: ".gpuckpt/../etc/passwd", Typeflag: tar.TypeReg},
		"hidden parent":  {Name: ".gpuckpt/x/../../y", Typeflag: tar.TypeReg},
		"absolute":       {Name: "/.gpuckpt/pages-2.img", Typeflag: tar.TypeReg},
		"elsewhere":      {Name: "etc/passwd", Typeflag: tar.TypeReg},
		"deeper":         {Name: ".gpuckpt/a/b", Typeflag: tar.TypeReg},
		"symbolic link":  {Name: ".gpuckpt/pages-2.img", Typeflag: tar.TypeSymlink, Linkname: "/etc/shadow"},
		"hard link":      {Name: ".gpuckpt/pages-2.img", Typeflag: tar.TypeLink, Linkname: "etc/shadow"},
		"block device":   {Name: ".gpuckpt/pages-2.img", Typeflag: tar.TypeBlock, Devmajor: 8},
		"char device":    {Name: ".gpuckpt/pages-2.img", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1},
		"FIFO":           {Name: ".gpuckpt/pages-2.img", Typeflag: tar.TypeFifo},
		"directory":      {Name: ".gpuckpt/sub/", Typeflag: tar.TypeDir},
		"root as a link": {Name: ".gpuckpt", Typeflag: tar.TypeSymlink, Linkname: "/etc"},
		"whiteout":       {Name: ".gpuckpt/.wh.pages-1.img", Typeflag: tar.TypeReg},
		"opaque":         {Name: ".gpuckpt/.wh..wh..opq", Typeflag: tar.TypeReg},
		"attribute":      {Name: ".gpuckpt/pages-2.img", Typeflag: tar.TypeReg, PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "/etc"}},
	}
}

func TestVerifyRefusesHostileArchives(t *testing.T) {
	store := newLayout(t)
	dir := newCheckpoint(t, 0, random(3<<20))
	r := build(t, store, dir, Options{Compression: Zstd}) // with GPU state in layers
	meta, err := os.ReadFile(filepath.Join(dir, images.MetadataName))
	if err != nil {
		t.Fatal(err)
	}
	first := plainTar(t, map[string]string{".gpuckpt/" + images.MetadataName: string(meta)})
	first = first[:len(first)-1024] // less its end
	if _, err := Verify(t.Context(), store, replaced(t, store, r.Manifest, LayerCRIU, append(bytes.Clone(first), make([]byte, 1024)...)), nil); err != nil {
		t.Fatalf("what the others are made of: %v", err)
	}
	for name, h := range hostile() {
		for _, kind := range []string{LayerCRIU, LayerGPU} {
			t.Run(name+" in "+kind, func(t *testing.T) {
				archive := archiveOf(t, h)
				if kind == LayerCRIU {
					archive = append(bytes.Clone(first), archive...)
				}
				refuses(t, store, replaced(t, store, r.Manifest, kind, archive), images.ErrDamaged, strings.TrimSuffix(h.Name, "/"))
			})
		}
	}
	twice := append(bytes.Clone(first), plainTar(t, map[string]string{".gpuckpt/" + images.MetadataName: string(meta)})...)
	refuses(t, store, replaced(t, store, r.Manifest, LayerCRIU, twice), images.ErrDamaged, "twice")
	piece := append(bytes.Clone(first), archiveOf(t, &tar.Header{Name: ".gpuckpt/gpu-1-0.000000000000", Size: 4096, Typeflag: tar.TypeReg})...)
	refuses(t, store, replaced(t, store, r.Manifest, LayerCRIU, piece), images.ErrDamaged, "gpu-1-0.000000000000")
	refuses(t, store, replaced(t, store, r.Manifest, LayerCRIU, archiveOf(t)), images.ErrDamaged, "it has no "+images.MetadataName)
	// Who lists images reads the begin of each, and not a layer that has no end.
	late := archiveOf(t, &tar.Header{Name: ".gpuckpt/core-1.img", Size: 1024, Typeflag: tar.TypeReg})
	late = append(late[:len(late)-1024], append(bytes.Clone(first), make([]byte, 1024)...)...)
	second := replaced(t, store, r.Manifest, LayerCRIU, late)
	refuses(t, store, second, images.ErrDamaged, "its first file is core-1.img")
	if _, err := Inspect(t.Context(), store, second); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("a layer that begins with another file: %v", err)
	}
	// And it reads no signature that the shim would not.
	for most, seals := range map[int64]int{4096: 17, 4097: 1} {
		var files []*tar.Header
		for n := range seals {
			files = append(files, &tar.Header{Name: fmt.Sprintf(".gpuckpt/%s.%d.sig", sign.ManifestName, n), Size: most, Typeflag: tar.TypeReg})
		}
		image, err := Inspect(t.Context(), store, replaced(t, store, r.Manifest, LayerCRIU, append(bytes.Clone(first), archiveOf(t, files...)...)))
		if err != nil {
			t.Fatal(err)
		}
		if found, err := ReadSeal(t.Context(), store, image); !errors.Is(err, sign.ErrMalformed) {
			t.Errorf("%d signatures of %d bytes: %v, %v", seals, most, found != nil, err)
		}
	}
	for name, h := range map[string]*tar.Header{
		"another area":    {Name: ".gpuckpt/gpu-2-0.000000000000", Size: 4096, Typeflag: tar.TypeReg},
		"half a piece":    {Name: ".gpuckpt/gpu-1-0.000000001000", Size: 4096, Typeflag: tar.TypeReg},
		"behind its end":  {Name: ".gpuckpt/gpu-1-0.000000000000", Size: 4 << 20, Typeflag: tar.TypeReg},
		"another's range": {Name: ".gpuckpt/gpu-1-0.000010000000", Size: 4096, Typeflag: tar.TypeReg},
		"CRIU's":          {Name: ".gpuckpt/pages-1.img", Size: 4096, Typeflag: tar.TypeReg},
	} {
		t.Run(name, func(t *testing.T) {
			refuses(t, store, replaced(t, store, r.Manifest, LayerGPU, archiveOf(t, h)), images.ErrDamaged, strings.TrimPrefix(h.Name, ".gpuckpt/"))
		})
	}
	newer := bytes.Replace(meta, []byte(`"schemaVersion": 2`), []byte(`"schemaVersion": 7`), 1)
	refuses(t, store, replaced(t, store, r.Manifest, LayerCRIU, plainTar(t, map[string]string{".gpuckpt/" + images.MetadataName: string(newer)})), images.ErrSchema, "version 7")
	changed := bytes.Replace(meta, []byte("580.159.04"), []byte("580.159.05"), 1)
	refuses(t, store, replaced(t, store, r.Manifest, LayerCRIU, plainTar(t, map[string]string{".gpuckpt/" + images.MetadataName: string(changed)})), images.ErrMalformed, images.MetadataName)
}

func TestVerifyRefusesOtherManifests(t *testing.T) {
	store := newLayout(t)
	refuses(t, store, newBase(t, store), ErrNotCheckpoint)
	for c, gpu := range map[Compression]int{Zstd: 0, "": 2} { // the first with GPU state
		t.Run(string(c), func(t *testing.T) { refusesOthers(t, store, c, gpu) })
	}
}

func refusesOthers(t *testing.T, store *testLayout, c Compression, gpu int) {
	t.Helper()
	r := build(t, store, newCheckpoint(t, 0, random(70<<20)), Options{Compression: c})
	m, _, err := manifestOf(t.Context(), store, r.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	config, ids, err := readConfig(t.Context(), store, &m)
	if err != nil {
		t.Fatal(err)
	}
	edited := func(edit func(*ocispec.Manifest)) ocispec.Descriptor {
		data, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var other ocispec.Manifest
		if err := json.Unmarshal(data, &other); err != nil {
			t.Fatal(err)
		}
		edit(&other)
		return rewritten(t, store, other, config)
	}
	for name, edit := range map[string]func(*ocispec.Manifest){
		"another driver":   func(m *ocispec.Manifest) { m.Annotations[annotations.Driver] = "1" },
		"no cut":           func(m *ocispec.Manifest) { delete(m.Annotations, annotations.LayerBytes) },
		"an odd cut":       func(m *ocispec.Manifest) { m.Annotations[annotations.LayerBytes] = "100000000" },
		"another offset":   func(m *ocispec.Manifest) { m.Layers[gpu].Annotations[annotations.Offset] = "4096" },
		"the same offset":  func(m *ocispec.Manifest) { m.Layers[gpu+1].Annotations[annotations.Offset] = "0" },
		"another area":     func(m *ocispec.Manifest) { m.Layers[gpu].Annotations[annotations.Area] = "gpu-9-9" },
		"two of CRIU":      func(m *ocispec.Manifest) { m.Layers[gpu].Annotations[annotations.Layer] = LayerCRIU },
		"no annotation":    func(m *ocispec.Manifest) { m.Layers[gpu].Annotations = nil },
		"a layer too few":  func(m *ocispec.Manifest) { m.Layers = m.Layers[1:] },
		"another type":     func(m *ocispec.Manifest) { m.Layers[gpu].MediaType = "application/x" },
		"another encoding": func(m *ocispec.Manifest) { m.Layers[gpu].MediaType = ocispec.MediaTypeImageLayerGzip },
		"another size":     func(m *ocispec.Manifest) { m.Layers[gpu].Size++ },
		"a bad digest":     func(m *ocispec.Manifest) { m.Layers[gpu].Digest = "sha256:../../etc/passwd" },
	} {
		t.Run(name, func(t *testing.T) { refuses(t, store, edited(edit), images.ErrDamaged) })
	}
	// A file is made by the name of the area before anything is verified.
	for _, area := range []string{"", "../../gpu-1-0", "/gpu-1-0", "a/gpu-1-0", "gpu-1-0.000000000000", "gpu-1-0\n", "gpu-01-0"} {
		manifest := edited(func(m *ocispec.Manifest) { m.Layers[gpu].Annotations[annotations.Area] = area })
		if _, err := Outline(t.Context(), store, manifest); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("the area %q: %v", area, err)
		}
	}
	// The layers are all there, and one of GPU state is left out of the image.
	config["rootfs"], err = json.Marshal(rootfs(slices.Delete(slices.Clone(ids), gpu, gpu+1)))
	if err != nil {
		t.Fatal(err)
	}
	refuses(t, store, edited(func(m *ocispec.Manifest) { m.Layers = slices.Delete(m.Layers, gpu, gpu+1) }), images.ErrDamaged, "gpu-1-0 is damaged: block 0")
}

// Of a blob that is missing it says so, and not that what is in its place, or behind it, is damaged.
func TestVerifyAMissingBlob(t *testing.T) {
	store := newLayout(t)
	state := make([]byte, 60<<20)
	copy(state, random(1<<20))
	copy(state[40<<20:], random(1<<20))
	r := build(t, store, newCheckpoint(t, 0, state), Options{})
	m, _, err := manifestOf(t.Context(), store, r.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	var blobs []ocispec.Descriptor
	for i, l := range m.Layers {
		if l.MediaType != MediaTypeGPU {
			continue
		}
		blobs = append(blobs, l)
		if of := References(&m)[fmt.Sprintf("containerd.io/gc.ref.content.gpu.%d", i)]; of != l.Digest.String() {
			t.Errorf("containerd keeps %q for blob %s", of, l.Digest)
		}
	}
	if len(blobs) != 2 {
		t.Fatalf("there are %d blobs", len(blobs))
	}
	for _, b := range blobs {
		path := blobPath(store.dir, b.Digest)
		if err := os.Rename(path, path+"x"); err != nil {
			t.Fatal(err)
		}
		_, err := Verify(t.Context(), store, r.Manifest, nil)
		if err == nil || !strings.Contains(err.Error(), b.Digest.String()) || strings.Contains(err.Error(), "block") {
			t.Errorf("got %v", err)
		}
		if err := os.Rename(path+"x", path); err != nil {
			t.Fatal(err)
		}
	}
}
