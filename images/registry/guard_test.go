// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/layout"
)

// A registry that answers with the address of another service has nothing sent there.
func TestUploadElsewhere(t *testing.T) {
	var asked atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer other.Close()
	there := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("Location", other.URL+"/v1/kv/anything?a=b")
		w.WriteHeader(http.StatusAccepted)
	}))
	defer there.Close()
	store, err := layout.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	image := writeImage(t, store)
	_, err = Push(t.Context(), store, strings.TrimPrefix(there.URL, "http://")+"/x/y:1", image, Options{
		Credentials: func(string) (string, string, error) { return "", "", nil },
	})
	if err == nil || !strings.Contains(err.Error(), "the registry wants the upload at another host, "+strings.TrimPrefix(other.URL, "http://")) {
		t.Errorf("it says %v", err)
	}
	if n := asked.Load(); n > 0 {
		t.Errorf("the other service got %d requests", n)
	}
}

// What a registry elsewhere names is not asked if it is on this machine.
func TestOwnMachine(t *testing.T) {
	var asked atomic.Int32
	local := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer local.Close()
	host := strings.TrimPrefix(local.URL, "http://")
	port := host[strings.LastIndex(host, ":"):]
	for _, c := range []struct {
		name, own, method, url, form string
		says                         string // "" for what is asked
	}{
		{"the registry itself", host, http.MethodPut, local.URL, "", ""},
		{"a blob that lies elsewhere", "registry.test", http.MethodGet, local.URL, "", "an address of this machine"},
		{"by a name", "registry.test", http.MethodGet, "http://localhost" + port, "", "an address of this machine"},
		{"by IPv6", "registry.test", http.MethodGet, "http://[::1]" + port, "", "an address of this machine"},
		{"by IPv4 in IPv6", "registry.test", http.MethodGet, "http://[::ffff:127.0.0.1]" + port, "", "an address of this machine"},
		{"by any other loopback address", "registry.test", http.MethodGet, "http://127.9.9.9" + port, "", "an address of this machine"},
		{"by a link-local address", "registry.test", http.MethodGet, "http://169.254.169.254/latest", "", "an address of this machine"},
		{"by one of IPv6", "registry.test", http.MethodGet, "http://[fe80::1%25lo]/latest", "", "an address of this machine"},
		{"by a cloud's address", "registry.test", http.MethodGet, "http://100.100.100.200/latest", "", "an address of this machine"},
		{"by a cloud's of IPv6", "registry.test", http.MethodGet, "http://[fd00:ec2::254]/latest", "", "an address of this machine"},
		{"by a cloud's in IPv6", "registry.test", http.MethodGet, "http://[::ffff:168.63.129.16]/latest", "", "an address of this machine"},
		{"by no address", "registry.test", http.MethodGet, "http://0.0.0.0" + port, "", "an address of this machine"},
		{"another service under the registry's name", "localhost:1", http.MethodPut, local.URL, "", "wants the upload at another host"},
		{"a token", "registry.test", http.MethodPost, local.URL, "application/x-www-form-urlencoded", "an address of this machine"},
		{"an upload", "registry.test", http.MethodPost, local.URL, "application/octet-stream", "wants the upload at another host"},
		{"a token, beside a registry here", "localhost:1", http.MethodGet, local.URL, "", ""},
		{"an upload, beside a registry here", "localhost:1", http.MethodPatch, local.URL, "", "wants the upload at another host"},
	} {
		t.Run(c.name, func(t *testing.T) {
			asked.Store(0)
			hosts, err := guarded(func(string) ([]docker.RegistryHost, error) {
				return []docker.RegistryHost{{Client: &http.Client{Transport: docker.DefaultHTTPTransport(nil)}, Scheme: "http", Host: c.own}}, nil
			})(c.own)
			if err != nil {
				t.Fatal(err)
			}
			request, err := http.NewRequestWithContext(t.Context(), c.method, c.url, strings.NewReader("x"))
			if err != nil {
				t.Fatal(err)
			}
			request.Header.Set("Content-Type", c.form)
			answer, err := hosts[0].Client.Do(request)
			if err == nil {
				_, _ = io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
			}
			if c.says == "" && (err != nil || asked.Load() != 1) || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says) || asked.Load() != 0 || transient(err)) {
				t.Errorf("error %v, %d requests", err, asked.Load())
			}
		})
	}
}

// What a registry, or whoever it names, answers to who asks for a token has a bound: all of it is in memory.
func TestTokenIsBounded(t *testing.T) {
	const line = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	var sent atomic.Int64
	there := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/token" {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+r.Host+`/token",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, err := io.WriteString(w, `{"token": "`)
		for chunk := strings.Repeat(line, 1<<10); err == nil && sent.Load() < 256<<20; sent.Add(int64(len(chunk))) {
			_, err = io.WriteString(w, chunk)
		}
	}))
	defer there.Close()
	store, err := layout.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	for name, user := range map[string]string{"by a question": "", "by a form": "user"} {
		t.Run(name, func(t *testing.T) {
			sent.Store(0)
			_, err := Push(t.Context(), store, strings.TrimPrefix(there.URL, "http://")+"/x/y:1", writeImage(t, store), Options{
				Credentials: func(string) (string, string, error) { return user, user, nil },
			})
			if err == nil || !strings.Contains(err.Error(), "the registry's answer has more than 1MiB") || sent.Load() > 64<<20 {
				t.Errorf("it says %v, after %d bytes", err, sent.Load())
			}
		})
	}
}

// writeImage writes a small image.
func writeImage(t *testing.T, store *layout.Dir) ocispec.Descriptor {
	t.Helper()
	write := func(mediaType, text string) ocispec.Descriptor {
		d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromString(text), Size: int64(len(text))}
		if err := content.WriteBlob(t.Context(), store, text, strings.NewReader(text), d); err != nil {
			t.Fatal(err)
		}
		return d
	}
	config := write(ocispec.MediaTypeImageConfig, "{}")
	data, err := json.Marshal(ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Config: config})
	if err != nil {
		t.Fatal(err)
	}
	return write(ocispec.MediaTypeImageManifest, string(data))
}
