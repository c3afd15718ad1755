// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// whiteout begins the names of entries that remove a file of the layers below; whiteoutOpaque
// empties its directory (OCI image specification, "Whiteouts").
const (
	whiteout       = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// Layer opens a layer of writable files: a plain tar archive.
type Layer func(context.Context) (io.ReadCloser, error)

// cleanName is images.CleanTarName with this package's error.
func cleanName(name string) (string, error) {
	name, err := images.CleanTarName(name)
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return name, err
}

// cleanDeleted returns the name of a deleted file relative to the root.
func cleanDeleted(name string) (string, error) {
	name, err := cleanName(strings.TrimPrefix(name, "/"))
	if err == nil && name == "." {
		err = fmt.Errorf("%w: %s deletes the root", ErrMalformed, metadata.DeletedFilesFile)
	}
	return name, err
}

// RootFS returns the container's writable files as a layer, a plain tar archive in which the
// deleted files are whiteouts; nil without any. Reading fails with ErrMalformed where the archive's
// own layer is not a tar archive.
func (a *Archive) RootFS(ctx context.Context) (io.ReadCloser, error) {
	if a.rootfs == nil && len(a.deleted) == 0 {
		return nil, nil
	}
	var plain io.ReadCloser
	if a.rootfs != nil {
		var err error
		// containerd's CRI calls a compressed layer rootfs-diff.tar as well.
		if plain, err = oci.Decompress(io.NewSectionReader(a.rootfs.Data, 0, int64(a.rootfs.Bytes)), ""); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrMalformed, metadata.RootFsDiffTar, err)
		}
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(a.writeRootFS(ctx, w, plain)) }()
	return r, nil
}

func (a *Archive) writeRootFS(ctx context.Context, w io.Writer, plain io.ReadCloser) error {
	out := tar.NewWriter(w)
	there := make(map[string]bool)
	if plain != nil {
		defer plain.Close()
		err := entries(ctx, plain, ErrMalformed, func(name string, h *tar.Header, data io.Reader) error {
			there[name] = true
			return copyEntry(out, h, data)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", metadata.RootFsDiffTar, err)
		}
	}
	for _, name := range a.deleted {
		name, err := cleanDeleted(name)
		if err != nil {
			return err
		}
		mark := path.Join(path.Dir(name), whiteout+path.Base(name))
		if there[mark] {
			continue
		}
		there[mark] = true
		if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: mark, Mode: 0o600}); err != nil {
			return err
		}
	}
	return out.Close()
}

// entries calls do for each entry of a tar archive, by its cleaned name, or returns unreadable.
func entries(ctx context.Context, r io.Reader, unreadable error, do func(name string, h *tar.Header, data io.Reader) error) error {
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("%w: %w", unreadable, err)
		}
		name, err := cleanName(h.Name)
		if err == nil {
			err = do(name, h, in)
		}
		if err != nil {
			return err
		}
	}
}

func copyEntry(out *tar.Writer, h *tar.Header, in io.Reader) error {
	// A sparse file is written whole, in whatever form holds its name and times.
	h.Format = tar.FormatUnknown
	if h.Typeflag == tar.TypeGNUSparse {
		h.Typeflag = tar.TypeReg
	}
	maps.DeleteFunc(h.PAXRecords, func(key, _ string) bool { return strings.HasPrefix(key, "GNU.sparse.") })
	if err := out.WriteHeader(h); err != nil {
		return fmt.Errorf("%w: %q: %w", ErrMalformed, h.Name, err)
	}
	if _, err := io.Copy(out, in); err != nil {
		return fmt.Errorf("%q: %w", h.Name, err)
	}
	return nil
}

// merge writes layers, bottom up, as one rootfs-diff.tar. It returns the list for deleted.files:
// what a layer removes and no layer above puts back. The list has no form for an opaque directory,
// whose whiteout stays in the tar for readers that know layers.
func merge(ctx context.Context, w io.Writer, layers []Layer) (deleted []string, err error) {
	out := tar.NewWriter(w)
	gone := make(map[string]bool)
	for _, layer := range layers {
		if err := mergeLayer(ctx, out, layer, gone); err != nil {
			return nil, err
		}
	}
	return slices.Sorted(maps.Keys(gone)), out.Close()
}

func mergeLayer(ctx context.Context, out *tar.Writer, layer Layer, gone map[string]bool) (err error) {
	data, err := layer(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	// The whiteouts of a layer are about those below it, wherever they stand.
	var removed []string
	err = entries(ctx, data, errors.New("read a layer"), func(name string, h *tar.Header, data io.Reader) error {
		if hidden, ok := strings.CutPrefix(path.Base(name), whiteout); ok && path.Base(name) != whiteoutOpaque {
			removed = append(removed, path.Join(path.Dir(name), hidden))
			return nil
		}
		for at := name; at != "."; at = path.Dir(at) {
			delete(gone, at)
		}
		return copyEntry(out, h, data)
	})
	for _, name := range removed {
		gone[name] = true
	}
	return err
}
