// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/log"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/crypt"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// hostile is a registry that answers what it is told to.
type hostile struct {
	mu                  sync.Mutex
	first, other        []byte // what the name stands for, and what any unknown digest does
	mediaType, digested string
	blobs               map[digest.Digest][]byte
}

func (h *hostile) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	name := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	data, ok := h.blobs[digest.Digest(name)]
	switch {
	case name == "1":
		data = h.first
		w.Header().Set("Docker-Content-Digest", h.digested)
	case !ok: // it has whatever it is asked for
		data = h.other
	}
	w.Header().Set("Content-Type", h.mediaType)
	w.Header().Set("Content-Length", fmt.Sprint(len(data)))
	if r.Method == http.MethodGet {
		_, _ = w.Write(data)
	}
}

// seeds are a checkpoint's manifest, and manifests with what an image never has.
func seeds(f *testing.F) {
	const layer = `{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":%q,"size":%d,"annotations":{"` + annotations.Layer + `":%q}}`
	manifest := func(config string, layers ...string) []byte {
		return fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":%q,"annotations":{%q:"67108864"},"config":{"mediaType":%q,"digest":%q,"size":SIZE},"layers":[%s]}`,
			ocispec.MediaTypeImageManifest, annotations.LayerBytes, ocispec.MediaTypeImageConfig, config, strings.Join(layers, ","))
	}
	config := []byte(`{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["LAYER"]}}`)
	for _, m := range [][]byte{
		manifest("CONFIG", fmt.Sprintf(layer, "LAYER", 5, oci.LayerCRIU)),
		manifest("", fmt.Sprintf(layer, "LAYER", 5, oci.LayerCRIU)),
		manifest("CONFIG", fmt.Sprintf(layer, "blake3:00", -5, oci.LayerCRIU)),
		manifest("sha512:00", fmt.Sprintf(layer, "", 1, oci.LayerCRIU)),
		[]byte(`{"schemaVersion":2,"layers":null,"config":null}`),
	} {
		f.Add(m, config, []byte("layer"), ocispec.MediaTypeImageManifest, "")
		f.Add(m, []byte(`{"rootfs":{"diff_ids":["no digest"]}}`), []byte("layer"), ocispec.MediaTypeImageManifest, "")
	}
	index := fmt.Sprintf(`{"schemaVersion":2,"manifests":[{"mediaType":%q,"digest":"no digest","size":-1,"platform":{"architecture":"amd64","os":"linux"}}]}`, ocispec.MediaTypeImageManifest)
	f.Add([]byte(index), config, []byte("layer"), ocispec.MediaTypeImageIndex, "")
	f.Add([]byte(`{"manifests":[null,{}]}`), []byte(`{"rootfs":{"diff_ids":["x"]}}`), []byte{}, ocispec.MediaTypeImageIndex, "sha256:")
}

// Whatever a registry answers, a look at an image and a pull end, and with an error as a rule. What
// a look has taken has digests that name something.
func FuzzAnswers(f *testing.F) {
	seeds(f)
	if err := log.SetLevel("panic"); err != nil { // containerd's library has a line for each answer
		f.Fatal(err)
	}
	h := new(hostile)
	web := httptest.NewServer(h)
	f.Cleanup(web.Close)
	o := Options{
		Attempts: 1, Pause: time.Millisecond, HostsDir: f.TempDir(),
		Credentials: func(string) (user, secret string, err error) { return "", "", nil },
	}
	name := strings.TrimPrefix(web.URL, "http://") + "/job:1"
	f.Fuzz(func(t *testing.T, first, config, layer []byte, mediaType, digested string) {
		config = bytes.ReplaceAll(config, []byte("LAYER"), []byte(digest.FromBytes(layer)))
		first = bytes.ReplaceAll(first, []byte("SIZE"), fmt.Append(nil, len(config)))
		first = bytes.ReplaceAll(first, []byte("CONFIG"), []byte(digest.FromBytes(config)))
		first = bytes.ReplaceAll(first, []byte("LAYER"), []byte(digest.FromBytes(layer)))
		if digested == "" {
			digested = digest.FromBytes(first).String()
		}
		h.mu.Lock()
		h.first, h.other, h.mediaType, h.digested = first, config, mediaType, digested
		h.blobs = map[digest.Digest][]byte{}
		for _, b := range [][]byte{first, config, layer} {
			h.blobs[digest.FromBytes(b)] = b
		}
		h.mu.Unlock()
		look(t, name, o)
		fetchAll(t, name, o)
	})
}

// look does what `gpuckpt restore --pull` does before it fetches.
func look(t *testing.T, name string, o Options) {
	s, err := Open(t.Context(), name, "pull", o)
	if err != nil {
		return
	}
	_, _ = crypt.Manifest(t.Context(), s, s.Image)
	image, err := oci.Outline(t.Context(), s, s.Image)
	if err != nil {
		return
	}
	store, err := local.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range image.Layers {
		l.Digest.Algorithm().Hash()
		l.DiffID.Algorithm().Hash()
		d := l.Descriptor()
		if d.Size < 0 {
			t.Fatalf("a layer of %d bytes was taken", d.Size)
		}
		if s.Store(t.Context(), store, d) == nil {
			if info, err := store.Info(t.Context(), l.Digest); err != nil || info.Size != d.Size {
				t.Fatalf("stored as %v, %v", info, err)
			}
		}
	}
	s.End("pulled")
}

// fetchAll does what a Pull does without a containerd.
func fetchAll(t *testing.T, name string, o Options) {
	s, err := Open(t.Context(), name, "pull", o)
	if err != nil {
		return
	}
	store, err := local.NewLabeledStore(t.TempDir(), noLabels{})
	if err != nil {
		t.Fatal(err)
	}
	fetch, err := s.handler(store, func() *localstore.Store { return nil }, platforms.Default())
	if err != nil {
		t.Fatal(err)
	}
	_ = cimages.Dispatch(t.Context(), fetch, nil, s.Image)
	s.End("pulled")
}

// noLabels forgets the labels of a store.
type noLabels struct{}

func (noLabels) Get(digest.Digest) (map[string]string, error) { return nil, nil }

func (noLabels) Set(digest.Digest, map[string]string) error { return nil }

func (noLabels) Update(_ digest.Digest, l map[string]string) (map[string]string, error) {
	return l, nil
}
