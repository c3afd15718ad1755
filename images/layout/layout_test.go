// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/go-digest"
)

// Whatever an archive says, only its own bytes are read, and no more than a blob has.
func FuzzOpenTar(f *testing.F) {
	blob := []byte("{}")
	digested := digest.FromBytes(blob)
	var good bytes.Buffer
	w := tar.NewWriter(&good)
	for _, file := range [][2]string{
		{"index.json", fmt.Sprintf(`{"manifests":[{"digest":%q,"size":2,"annotations":{"org.opencontainers.image.ref.name":"a"}}]}`, digested)},
		{"blobs/sha256/" + digested.Encoded(), string(blob)},
		{"blobs/sha256/../../index.json", "x"},
		{"blobs/sha256/" + digested.Encoded()[1:], "y"},
	} {
		if err := w.WriteHeader(&tar.Header{Name: file[0], Mode: 0o644, Size: int64(len(file[1]))}); err != nil {
			f.Fatal(err)
		}
		if _, err := io.WriteString(w, file[1]); err != nil {
			f.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		f.Fatal(err)
	}
	f.Add(good.Bytes(), "a")
	f.Add([]byte("not an archive"), "")
	f.Fuzz(func(t *testing.T, data []byte, name string) {
		path := filepath.Join(t.TempDir(), "archive.tar")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		archive, err := OpenTar(path)
		if err != nil {
			return
		}
		defer archive.Close()
		found, err := archive.Get(name)
		if err != nil {
			return
		}
		r, err := archive.ReaderAt(t.Context(), found)
		if err != nil {
			return
		}
		defer r.Close()
		info, err := archive.Info(t.Context(), found.Digest)
		if err != nil || info.Size != r.Size() || r.Size() > int64(len(data)) {
			t.Errorf("%+v, %v, of %d bytes in an archive of %d", info, err, r.Size(), len(data))
		}
		if n, err := io.Copy(io.Discard, io.NewSectionReader(r, 0, r.Size())); n != r.Size() {
			t.Errorf("%d bytes of %d: %v", n, r.Size(), err)
		}
	})
}
