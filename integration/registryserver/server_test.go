// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registryserver

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// What is pushed comes back whole, blobs that are there are not sent again, and
// nothing is left in the end.
func TestRegistry(t *testing.T) {
	dir := t.TempDir()
	s, err := Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	const bytes = 1 << 20
	image, err := random.Image(bytes, 4)
	if err != nil {
		t.Fatal(err)
	}
	first, err := name.ParseReference(s.Ref("job:1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(first, image); err != nil {
		t.Fatal(err)
	}
	received := s.Received()
	if received < 4*bytes || received > 5*bytes {
		t.Errorf("%d bytes were sent of an image of 4 layers of %d", received, bytes)
	}
	if err := remote.Write(first.Context().Tag("2"), image); err != nil {
		t.Fatal(err)
	}
	if again := s.Received() - received; again != 0 {
		t.Errorf("%d bytes were sent again", again)
	}
	back, err := remote.Image(first.Context().Tag("2"))
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Image(back); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Two uploads are under way at once, with the requests that containerd makes, and
// one whose bytes are not those of its digest is refused.
func TestRegistryUploads(t *testing.T) {
	s, err := Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	const blobs = "/v2/job/blobs/"
	// sha256 of "hello"
	const digest = "sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
	put := func(body io.Reader, size int64) (int, error) {
		started, err := http.Post("http://"+s.host+blobs+"uploads/", "", nil)
		if err != nil {
			return 0, err
		}
		started.Body.Close()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://"+s.host+started.Header.Get("Location")+"?digest="+digest, body)
		if err != nil {
			return 0, err
		}
		request.ContentLength = size
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return 0, err
		}
		return answer.StatusCode, answer.Body.Close()
	}
	held, release := io.Pipe()
	slow := make(chan error, 1)
	go func() {
		status, err := put(held, 5)
		if err == nil && status != http.StatusCreated {
			err = errors.New(http.StatusText(status))
		}
		slow <- err
	}()
	if _, err := release.Write([]byte("he")); err != nil {
		t.Fatal(err)
	}
	harness.Within(t, "the first upload begins", func() bool {
		files, err := os.ReadDir(s.blobs.dir)
		return err == nil && len(files) > 0
	})
	if status, err := put(strings.NewReader("hellO"), 5); err != nil || status < 400 {
		t.Errorf("wrong bytes: status %d, %v", status, err)
	}
	if status, err := put(bytes.NewReader([]byte("hello")), 5); err != nil || status != http.StatusCreated {
		t.Errorf("a second upload: status %d, %v", status, err)
	}
	if _, err := release.Write([]byte("llo")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(release.Close(), <-slow); err != nil {
		t.Error(err)
	}
	missing, err := http.Head("http://" + s.host + blobs + strings.Replace(digest, "2cf24", "00000", 1))
	if err != nil || missing.StatusCode != http.StatusNotFound {
		t.Errorf("a blob that is not there: %v, %v", missing, err)
	}
}
