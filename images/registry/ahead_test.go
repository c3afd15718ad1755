// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// taker is a registry that has no blob.
type taker struct {
	refuses atomic.Bool // to take any
	begun   atomic.Int32
	hold    chan struct{} // if not nil, a blob waits for it
}

func (k *taker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.Method {
	case http.MethodHead:
		w.WriteHeader(http.StatusNotFound)
	case http.MethodPost:
		k.begun.Add(1)
		if k.refuses.Load() {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		w.Header().Set("Location", r.URL.Path+"one")
		w.WriteHeader(http.StatusAccepted)
	default:
		_, _ = io.Copy(io.Discard, r.Body)
		if k.hold != nil {
			select {
			case <-k.hold:
			case <-r.Context().Done():
			}
		}
		w.Header().Set("Docker-Content-Digest", r.URL.Query().Get("digest"))
		w.WriteHeader(http.StatusCreated)
	}
}

// shelf is a store in memory.
type shelf map[digest.Digest][]byte

type reader struct{ *bytes.Reader }

func (reader) Close() error { return nil }

func (m shelf) ReaderAt(_ context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	return reader{bytes.NewReader(m[d.Digest])}, nil
}

// blobs returns so many that differ, and adds them.
func (m shelf) blobs(count int) (all []ocispec.Descriptor) {
	for i := range count {
		data := fmt.Appendf(nil, "blob %d", i)
		d := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromBytes(data), Size: int64(len(data))}
		m[d.Digest], all = data, append(all, d)
	}
	return all
}

// ahead begins to send to a registry, so many blobs at once, each with three attempts.
func ahead(t *testing.T, to http.Handler, store content.Provider, parallel int) (*Ahead, Options, string) {
	t.Helper()
	web := httptest.NewServer(to)
	t.Cleanup(web.Close)
	ref := strings.TrimPrefix(web.URL, "http://") + "/job:1"
	o := Options{
		Parallel: parallel, Attempts: 3, Pause: time.Millisecond,
		Credentials: func(string) (user, secret string, err error) { return "", "", nil },
	}
	a, err := Begin(t.Context(), store, ref, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	o.Ahead = a
	return a, o, ref
}

// A registry that takes nothing is not asked again for each blob: Push would say so after as many attempts as there are
// blobs, each with its pauses. What Ahead has not sent, Push sends.
func TestAheadGivesUp(t *testing.T) {
	k, store := new(taker), shelf{}
	k.refuses.Store(true)
	blobs := store.blobs(20)
	image := manifestOf(store, blobs)
	a, o, ref := ahead(t, k, store, 2)
	for _, d := range blobs {
		a.Add(d)
	}
	a.sent.Wait()
	if n := k.begun.Load(); n < 3 || n > 12 { // two blobs at once, and containerd asks twice
		t.Errorf("the registry was asked %d times", n)
	}
	if _, err := Push(t.Context(), store, ref, image, o); err == nil || !strings.Contains(err.Error(), "after 3 attempts") {
		t.Errorf("a push that the registry refuses: %v", err)
	}
	k.refuses.Store(false)
	result, err := Push(t.Context(), store, ref, image, o)
	if err != nil || result.Blobs != 21 || result.Moved != result.Bytes {
		t.Errorf("a push after that: %+v, %v", result, err)
	}
}

// A blob is sent once, also of an image that has it twice.
func TestAheadSendsOnce(t *testing.T) {
	k, store := &taker{hold: make(chan struct{})}, shelf{}
	d := store.blobs(1)[0]
	image := manifestOf(store, []ocispec.Descriptor{d, d})
	a, o, ref := ahead(t, k, store, 4)
	for range 3 {
		a.Add(d)
	}
	close(k.hold)
	result, err := Push(t.Context(), store, ref, image, o)
	if n := k.begun.Load(); err != nil || n != 1 || result.Blobs != 2 {
		t.Errorf("it was sent %d times; %+v, %v", n, result, err)
	}
}

// A Push that is cancelled does not wait for what Ahead sends.
func TestAheadPushIsCancelled(t *testing.T) {
	k, store := &taker{hold: make(chan struct{})}, shelf{}
	defer close(k.hold)
	blobs := store.blobs(2)
	image := manifestOf(store, blobs)
	a, o, ref := ahead(t, k, store, 1)
	a.Add(blobs[0])
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	var ended sync.WaitGroup
	ended.Go(func() {
		if _, err := Push(ctx, store, ref, image, o); err == nil {
			t.Error("no error")
		}
	})
	done := make(chan struct{})
	go func() { ended.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("it waits")
	}
}

// manifestOf adds the manifest of an image of layers.
func manifestOf(store shelf, layers []ocispec.Descriptor) ocispec.Descriptor {
	var list []string
	for _, d := range layers {
		list = append(list, fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":%d}`, d.MediaType, d.Digest, d.Size))
	}
	data := fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":%q,"config":%s,"layers":[%s]}`, ocispec.MediaTypeImageManifest, list[0], strings.Join(list, ","))
	d := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromBytes(data), Size: int64(len(data))}
	store[d.Digest] = data
	return d
}
