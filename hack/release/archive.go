// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path"
)

// writeTar writes a tree below a directory: its directories first, all of root, at one time.
func (r release) writeTar(w io.Writer, below string, t tree) error {
	out := tar.NewWriter(w)
	made := map[string]bool{".": true}
	var dir func(name string) error
	dir = func(name string) error {
		if made[name] {
			return nil
		}
		made[name] = true
		if err := dir(path.Dir(name)); err != nil {
			return err
		}
		return out.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: r.time})
	}
	for _, f := range t {
		name := path.Join(below, f.name)
		if err := dir(path.Dir(name)); err != nil {
			return err
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: int64(f.mode), Size: int64(len(f.data)), ModTime: r.time}
		if f.link != "" {
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.link
		}
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		if _, err := out.Write(f.data); err != nil {
			return err
		}
	}
	return out.Close()
}

// archive writes a tree as a .tar.gz.
func (r release) archive(name, below string, t tree) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	zipped := gzip.NewWriter(f)
	return errors.Join(r.writeTar(zipped, below, t), zipped.Close(), f.Close())
}
