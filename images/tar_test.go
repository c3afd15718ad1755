// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"testing"
)

func tarOf(t testing.TB, entries ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, h.Size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// rules has an archive for each rule of ReadTar, and a word of its refusal.
func rules(t testing.TB) map[string]struct {
	archive []byte
	says    string
} {
	type rule = struct {
		archive []byte
		says    string
	}
	file := &tar.Header{Name: "inventory.img", Typeflag: tar.TypeReg, Size: 600}
	dir := &tar.Header{Name: "inventory.img/", Typeflag: tar.TypeDir}
	one := func(h tar.Header) []byte {
		if h.Name == "" {
			h.Name = "inventory.img"
		}
		return tarOf(t, &h)
	}
	unnamed := one(tar.Header{Name: "x", Typeflag: tar.TypeReg})
	for i := range 512 { // the name goes, and the sum of the header has to be right
		switch {
		case i == 0:
			unnamed[i] = 0
		case i >= 148 && i < 156:
			unnamed[i] = ' '
		}
	}
	sum := 0
	for _, b := range unnamed[:512] {
		sum += int(b)
	}
	for i := 153; i >= 148; i-- {
		unnamed[i] = byte('0' + sum%8)
		sum /= 8
	}
	unnamed[154] = 0
	return map[string]rule{
		"symbolic link":         {one(tar.Header{Typeflag: tar.TypeSymlink, Linkname: "/etc/shadow"}), "neither"},
		"hard link":             {one(tar.Header{Typeflag: tar.TypeLink, Linkname: "x"}), "neither"},
		"block device":          {one(tar.Header{Typeflag: tar.TypeBlock, Devmajor: 8}), "neither"},
		"character device":      {one(tar.Header{Typeflag: tar.TypeChar, Devmajor: 1}), "neither"},
		"FIFO":                  {one(tar.Header{Typeflag: tar.TypeFifo}), "neither"},
		"link elsewhere":        {one(tar.Header{Name: "a/b/c", Typeflag: tar.TypeSymlink, Linkname: "d"}), "neither"},
		"no name":               {unnamed, "empty"},
		"the root as a file":    {one(tar.Header{Name: ".", Typeflag: tar.TypeReg}), "without a name"},
		"absolute":              {one(tar.Header{Name: "/inventory.img", Typeflag: tar.TypeReg}), "absolute"},
		"absolute directory":    {one(tar.Header{Name: "/etc/", Typeflag: tar.TypeDir}), "absolute"},
		"parent":                {one(tar.Header{Name: "../inventory.img", Typeflag: tar.TypeReg}), "leads out"},
		"back again":            {one(tar.Header{Name: "a/../inventory.img", Typeflag: tar.TypeReg}), "leads out"},
		"whiteout":              {one(tar.Header{Name: ".wh.inventory.img", Typeflag: tar.TypeReg}), "removal"},
		"opaque":                {one(tar.Header{Name: "checkpoint/.wh..wh..opq", Typeflag: tar.TypeReg}), "removal"},
		"extended attribute":    {one(tar.Header{Typeflag: tar.TypeReg, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "x"}}), "SCHILY.xattr"},
		"attribute, directory":  {one(tar.Header{Name: "x/", Typeflag: tar.TypeDir, PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"}}), "SCHILY.xattr"},
		"twice":                 {tarOf(t, file, file), "twice"},
		"twice, by other names": {tarOf(t, file, &tar.Header{Name: "./inventory.img", Typeflag: tar.TypeReg}), "twice"},
		"file, then directory":  {tarOf(t, file, dir), "twice"},
		"directory, then file":  {tarOf(t, dir, file), "twice"},
		"cut in a file":         {tarOf(t, file)[:700], ""},
		"cut in a header":       {tarOf(t, file)[:200], ""},
		"no archive":            {bytes.Repeat([]byte("no"), 1000), ""},
	}
}

func TestReadTarRefuses(t *testing.T) {
	for name, rule := range rules(t) {
		t.Run(name, func(t *testing.T) {
			err := ReadTar(bytes.NewReader(rule.archive), func(_ string, _ *tar.Header, data io.Reader) error {
				if _, err := io.Copy(io.Discard, data); err != nil {
					return errors.Join(ErrDamaged, err)
				}
				return nil
			})
			if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), rule.says) {
				t.Errorf("ReadTar: got %v, want one that says %q", err, rule.says)
			}
			if files, err := TarFiles(bytes.NewReader(rule.archive), int64(len(rule.archive))); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), rule.says) {
				t.Errorf("TarFiles: got %v, %v", files, err)
			}
		})
	}
}

func TestReadLayerRefuses(t *testing.T) {
	for name, h := range map[string]*tar.Header{
		"elsewhere":         {Name: "etc/passwd", Typeflag: tar.TypeReg},
		"at the root":       {Name: "inventory.img", Typeflag: tar.TypeReg},
		"deeper":            {Name: ".gpuckpt/a/b", Typeflag: tar.TypeReg},
		"another directory": {Name: ".gpuckpt/a/", Typeflag: tar.TypeDir},
		"as a file":         {Name: ".gpuckpt", Typeflag: tar.TypeReg},
		"by another name":   {Name: "./.gpuckpt/pages-1.img", Typeflag: tar.TypeReg},
		"two slashes":       {Name: ".gpuckpt//pages-1.img", Typeflag: tar.TypeReg},
	} {
		err := ReadLayer(bytes.NewReader(tarOf(t, h)), func(string, int64, io.Reader) error { return nil })
		if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "is not a file in /.gpuckpt") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestTarFiles(t *testing.T) {
	data := tarOf(t,
		&tar.Header{Name: "./", Typeflag: tar.TypeDir}, &tar.Header{Name: "checkpoint/", Typeflag: tar.TypeDir}, &tar.Header{Name: "./checkpoint", Typeflag: tar.TypeDir},
		&tar.Header{Name: "./checkpoint/inventory.img", Typeflag: tar.TypeReg, Size: 700}, &tar.Header{Name: strings.Repeat("long/", 50) + "x", Typeflag: tar.TypeReg, Size: 3})
	files, err := TarFiles(bytes.NewReader(data), int64(len(data)))
	var names []string
	for _, f := range files {
		names = append(names, f.Name)
	}
	if want := []string{"checkpoint/inventory.img", strings.Repeat("long/", 50) + "x"}; err != nil || !slices.Equal(names, want) {
		t.Fatalf("got %q, %v", names, err)
	}
	content := make([]byte, 700)
	if n, err := files[0].Data.ReadAt(content, 0); n != 700 || err != nil && err != io.EOF || slices.Max(content) != 0 {
		t.Errorf("read %d bytes, %v", n, err)
	}
}

func FuzzReadTar(f *testing.F) {
	for _, rule := range rules(f) {
		f.Add(rule.archive)
	}
	good := &tar.Header{Name: ".gpuckpt/inventory.img", Typeflag: tar.TypeReg, Size: 700}
	f.Add(tarOf(f, good))
	f.Add(tarOf(f, &tar.Header{Name: ".gpuckpt/", Typeflag: tar.TypeDir}, good))
	f.Add([]byte(nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		seen := make(map[string]bool)
		check := func(name string) {
			if seen[name] || name == "" || name == "." || path.IsAbs(name) || path.Clean(name) != name || slices.Contains(strings.Split(name, "/"), "..") {
				t.Fatalf("%q got through", name)
			}
			seen[name] = true
		}
		_ = ReadLayer(bytes.NewReader(data), func(name string, _ int64, r io.Reader) error {
			if strings.Contains(name, "/") {
				t.Fatalf("%q got through", name)
			}
			check(name)
			_, err := io.Copy(io.Discard, r)
			return err
		})
		clear(seen)
		files, err := TarFiles(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			return
		}
		for i, file := range files {
			check(file.Name)
			if _, err := io.Copy(io.Discard, io.NewSectionReader(file.Data, 0, int64(file.Bytes))); err != nil {
				t.Fatalf("%q cannot be read: %v", file.Name, err)
			}
			files[i].Name = path.Base(file.Name)
		}
		_, _ = OpenFiles(files)
	})
}

// The table of an archive's names is as small as its files are few, however long the names are.
func TestReadTarLongNames(t *testing.T) {
	var entries []*tar.Header
	for n := range 70 {
		entries = append(entries, &tar.Header{Name: fmt.Sprintf(".gpuckpt/%d%s", n, strings.Repeat("x", 1e6)), Typeflag: tar.TypeReg})
	}
	archive := tarOf(t, entries...)
	if err := ReadLayer(bytes.NewReader(archive), func(string, int64, io.Reader) error { return nil }); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "bytes of names") {
		t.Errorf("%.200v", err)
	}
}
