// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// moody is a registry with one blob. answer decides how each request for it ends.
type moody struct {
	data []byte
	mu   sync.Mutex
	from []int64 // where the requests began
	// answer returns how many bytes of the rest are sent, and a status in place of any.
	answer func(request int, rest int64) (send int64, status int)
	silent bool // does not end the connection after them
}

func (m *moody) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if strings.Contains(r.URL.Path, "/manifests/") {
		manifest := []byte(`{"schemaVersion":2}`)
		w.Header().Set("Content-Type", ocispec.MediaTypeImageManifest)
		w.Header().Set("Docker-Content-Digest", digest.FromBytes(manifest).String())
		w.Header().Set("Content-Length", fmt.Sprint(len(manifest)))
		_, _ = w.Write(manifest)
		return
	}
	var from int64
	_, _ = fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &from) // 0 without
	m.mu.Lock()
	request := len(m.from)
	m.from = append(m.from, from)
	m.mu.Unlock()
	send, status := m.answer(request, int64(len(m.data))-from)
	if status != 0 {
		w.WriteHeader(status)
		return
	}
	w.Header().Set("Content-Length", fmt.Sprint(int64(len(m.data))-from))
	if from > 0 {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(m.data)-1, len(m.data)))
		w.WriteHeader(http.StatusPartialContent)
	}
	_, _ = w.Write(m.data[from : from+send])
	w.(http.Flusher).Flush()
	if send < int64(len(m.data))-from {
		if m.silent {
			<-r.Context().Done()
		}
		panic(http.ErrAbortHandler)
	}
}

// read reads the blob of a registry by a Stream.
func (m *moody) read(t *testing.T, o Options) ([]byte, error) {
	t.Helper()
	web := httptest.NewServer(m)
	defer web.Close()
	o.Credentials = func(string) (user, secret string, err error) { return "", "", nil }
	o.Pause = time.Millisecond
	s, err := Open(t.Context(), strings.TrimPrefix(web.URL, "http://")+"/job:1", "pull", o)
	if err != nil {
		t.Fatal(err)
	}
	d := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromBytes(m.data), Size: int64(len(m.data))}
	r, err := s.Stream(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	return io.ReadAll(r)
}

// A manifest may say where else a blob is. Nobody is asked there: containerd's library does so past guarded.
func TestNowhereElse(t *testing.T) {
	var asked atomic.Int32
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer elsewhere.Close()
	m := &moody{data: []byte("{}"), answer: func(_ int, rest int64) (int64, int) { return rest, 0 }}
	web := httptest.NewServer(m)
	defer web.Close()
	s, err := Open(t.Context(), strings.TrimPrefix(web.URL, "http://")+"/job:1", "pull", Options{Credentials: func(string) (user, secret string, err error) { return "", "", nil }})
	if err != nil {
		t.Fatal(err)
	}
	d := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromBytes(m.data), Size: int64(len(m.data)), URLs: []string{elsewhere.URL + "/blob"}}
	r, err := s.Stream(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if data, err := io.ReadAll(r); err != nil || !bytes.Equal(data, m.data) {
		t.Errorf("a stream: %q, %v", data, err)
	}
	if _, err := s.ReaderAt(t.Context(), d); err != nil {
		t.Error(err)
	}
	if asked.Load() > 0 {
		t.Errorf("%d requests elsewhere", asked.Load())
	}
}

// A stream goes on behind the last byte that it has got, and gives up a registry that sends none.
func TestStream(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789"), 1<<15)
	size := int64(len(data))
	for _, test := range []struct {
		name     string
		answer   func(request int, rest int64) (int64, int)
		silent   bool
		err      string
		requests int
	}{
		{"whole", func(_ int, rest int64) (int64, int) { return rest, 0 }, false, "", 1},
		{"cut again and again", func(_ int, rest int64) (int64, int) { return min(rest, size/20), 0 }, false, "", 20},
		{"silent once", func(request int, rest int64) (int64, int) {
			if request == 0 {
				return size / 3, 0
			}
			return rest, 0
		}, true, "", 2},
		{"silent for good", func(request int, rest int64) (int64, int) {
			if request == 0 {
				return size / 3, 0
			}
			return 0, 0
		}, true, "given up after 3 attempts: the registry sent nothing for too long", 4},
		{"unwell once", func(request int, rest int64) (int64, int) {
			if request == 0 {
				return 0, http.StatusInternalServerError
			}
			return rest, 0
		}, false, "", 0},
		{"gone", func(request int, _ int64) (int64, int) {
			if request == 0 {
				return size / 2, 0
			}
			return 0, http.StatusNotFound
		}, false, "not found", 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := &moody{data: data, answer: test.answer, silent: test.silent}
			stall := time.Minute
			if test.silent {
				stall = 200 * time.Millisecond
			}
			got, err := m.read(t, Options{Attempts: 3, Stall: stall})
			if test.err == "" && (err != nil || !bytes.Equal(got, data)) {
				t.Fatalf("%d bytes of %d, %v", len(got), size, err)
			}
			if test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Fatalf("got %v, want %q", err, test.err)
			}
			if test.requests > 0 && !test.silent && len(m.from) < test.requests {
				t.Errorf("%d requests, at %d", len(m.from), m.from)
			}
			for i, from := range m.from[1:] {
				if from < m.from[i] || from > size {
					t.Errorf("the requests began at %d", m.from)
				}
			}
			if test.name == "cut again and again" && m.from[len(m.from)-1] == 0 {
				t.Errorf("all requests began at 0: %d", m.from)
			}
		})
	}
}

// A stream ends with its context.
func TestStreamIsGivenUp(t *testing.T) {
	m := &moody{data: []byte("01"), silent: true, answer: func(int, int64) (int64, int) { return 1, 0 }}
	web := httptest.NewServer(m)
	defer web.Close()
	o := Options{Credentials: func(string) (user, secret string, err error) { return "", "", nil }}
	s, err := Open(t.Context(), strings.TrimPrefix(web.URL, "http://")+"/job:1", "pull", o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r, err := s.Stream(ctx, ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromString("01"), Size: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// anything is a fetcher that has whatever it is asked for.
type anything []byte

func (a anything) Fetch(context.Context, ocispec.Descriptor) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(a)), nil
}

// A document by a digest that is none is refused: a registry's index may name it so.
func TestNoDigest(t *testing.T) {
	for _, d := range []digest.Digest{"", "no digest", "sha256:", "sha256:00", "blake3:" + digest.Digest(strings.Repeat("0", 64))} {
		if _, err := (documents{anything("{}")}).ReaderAt(t.Context(), ocispec.Descriptor{Digest: d, Size: -1}); err == nil {
			t.Errorf("%q was read", d)
		}
	}
}

// Of what a registry sends too much of nothing is written.
func TestCopyNoMore(t *testing.T) {
	const size = 5 << 20
	s := newSource("x/y:1", "pull", Options{}.defaults())
	s.documents.fetcher = remotes.FetcherFunc(func(context.Context, ocispec.Descriptor) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(make([]byte, 20<<20))), nil
	})
	var to bytes.Buffer
	told := uint64(0)
	err := s.Copy(t.Context(), &to, ocispec.Descriptor{Digest: digest.FromString("a"), Size: size}, func(n uint64) { told = n })
	if err != nil || to.Len() != size || told != size {
		t.Errorf("%d bytes are written of %d, and %d told: %v", to.Len(), size, told, err)
	}
}
