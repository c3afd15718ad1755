// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
)

const metadataFile = "checkpoint/" + images.MetadataName

// readArchive gives the sizes of the files in an archive of the kubelet's. Its checkpoint is in files of one
// directory, without sub-directories and links.
func readArchive(t *testing.T, name string) map[string]int64 {
	t.Helper()
	files := map[string]int64{}
	err := eachFile(name, func(header *tar.Header, _ io.Reader) error {
		files[header.Name] = header.Size
		if rest, ok := strings.CutPrefix(header.Name, "checkpoint/"); ok && rest != "" && (header.Typeflag != tar.TypeReg || path.Base(rest) != rest) {
			t.Errorf("%s has %s, which is not a file in one directory", name, header.Name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// readMetadata reads the metadata in an archive.
func readMetadata(t *testing.T, name string) *images.Metadata {
	t.Helper()
	var m *images.Metadata
	err := eachFile(name, func(header *tar.Header, r io.Reader) error {
		if header.Name != metadataFile {
			return nil
		}
		data, err := io.ReadAll(r)
		if err == nil {
			m, err = images.ParseMetadata(data)
		}
		return err
	})
	if err == nil && m == nil {
		err = errors.New("it has no " + metadataFile)
	}
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return m
}

// eachFile calls do for each entry of an archive.
func eachFile(name string, do func(*tar.Header, io.Reader) error) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = do(header, r)
		}
		if err != nil {
			return err
		}
	}
}
