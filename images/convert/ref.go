// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"archive/tar"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/localstore"
)

// The kinds of places where checkpoints are, as a Ref has them before its colon.
const (
	InContainerd = "containerd"         // an image in containerd
	InLayout     = "oci"                // an OCI layout
	InOCIArchive = "oci-archive"        // an OCI layout in a tar archive
	InKubernetes = "kubernetes-archive" // an archive of the kubelet
	InDir        = "dir"                // a dump
)

// Ref names a checkpoint: where it is, or where it goes.
type Ref struct {
	Kind string
	Path string // of the file or directory
	Name string // of the image, where the kind has names
}

// String returns the Ref as a user would write it, without its kind.
func (r Ref) String() string {
	switch {
	case r.Kind == InContainerd:
		return r.Name
	case r.Name != "":
		return r.Path + "@" + r.Name
	}
	return r.Path
}

// IsPath reports whether text names a file: no full name of an image begins like a path.
func IsPath(text string) bool { return strings.HasPrefix(text, "/") || strings.HasPrefix(text, ".") }

// ParseRef reads KIND:PATH[@NAME], containerd:NAME, a bare NAME, or a bare path that exists.
func ParseRef(text string) (Ref, error) {
	if kind, rest, ok := strings.Cut(text, ":"); ok {
		switch kind {
		case InContainerd:
			return Ref{Kind: kind, Name: rest}, localstore.CheckName(rest)
		case InLayout, InOCIArchive:
			path, name, _ := strings.Cut(rest, "@")
			return Ref{Kind: kind, Path: path, Name: name}, nil
		case InKubernetes, InDir:
			return Ref{Kind: kind, Path: rest}, nil
		}
	}
	if !IsPath(text) {
		err := localstore.CheckName(text)
		if err != nil && strings.HasSuffix(text, ".tar") {
			err = fmt.Errorf("%w; for a file, write its kind: %s:%s", err, InOCIArchive, text)
		}
		return Ref{Kind: InContainerd, Name: text}, err
	}
	path, name, _ := strings.Cut(text, "@")
	kind, err := kindOf(path)
	if err == nil && name != "" && (kind == InKubernetes || kind == InDir) {
		err = fmt.Errorf("%s has no images with names", path)
	}
	return Ref{Kind: kind, Path: path, Name: name}, err
}

func kindOf(path string) (string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if st.IsDir() {
		if _, err := os.Stat(filepath.Join(path, ocispec.ImageLayoutFile)); err == nil {
			return InLayout, nil
		}
		return InDir, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	// Either kind of archive has something of its own among its first files.
	for t := tar.NewReader(f); ; {
		h, err := t.Next()
		if err == io.EOF {
			return "", fmt.Errorf("%s is neither an OCI archive nor one of the kubelet's", path)
		}
		if err != nil {
			// Compressed, perhaps: the error of opening it as the kubelet's says so.
			return InKubernetes, nil
		}
		switch name := strings.TrimPrefix(h.Name, "./"); {
		case name == ocispec.ImageLayoutFile, name == ocispec.ImageIndexFile, strings.HasPrefix(name, ocispec.ImageBlobsDir+"/"):
			return InOCIArchive, nil
		case name == metadata.ConfigDumpFile, name == metadata.SpecDumpFile, strings.HasPrefix(name, metadata.CheckpointDirectory+"/"):
			return InKubernetes, nil
		}
	}
}
