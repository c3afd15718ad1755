// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

// message writes a protobuf message of these texts, by field, behind a number.
func message(texts map[protowire.Number]string) []byte {
	b := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 5)
	for _, n := range []protowire.Number{3, 6, 7, 8, 18} {
		if text, ok := texts[n]; ok {
			b = protowire.AppendString(protowire.AppendTag(b, n, protowire.BytesType), text)
		}
	}
	return b
}

// image writes entries as CRIU does.
func image(magic uint32, entries ...[]byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, criuCommonMagic)
	b = binary.LittleEndian.AppendUint32(b, magic)
	for _, e := range entries {
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(e))), e...)
	}
	return b
}

func TestMountsAndFiles(t *testing.T) {
	dir := t.TempDir()
	if mounts, err := Mounts(dir); err != nil || mounts != nil {
		t.Errorf("an empty directory: %v, %v", mounts, err)
	}
	if files, err := Files(dir); err != nil || files != nil {
		t.Errorf("an empty directory: %v, %v", files, err)
	}
	write := func(name string, data []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("mountpoints-12.img", image(criuMountsMagic,
		message(map[protowire.Number]string{6: "/", 7: "./", 8: "overlay"}),
		message(map[protowire.Number]string{7: "./dev/nvidia0", 18: "/dev/nvidia0"}),
		message(map[protowire.Number]string{7: "./lib", 18: "/usr/lib/libcuda.so.1"})))
	write("mountpoints-13.img", image(criuMountsMagic, message(map[protowire.Number]string{18: "/dev/nvidia0"})))
	write("files.img", image(criuFilesMagic,
		message(map[protowire.Number]string{3: string(message(map[protowire.Number]string{6: "/usr/lib/libc.so.6"}))}),
		message(map[protowire.Number]string{7: "a socket"})))
	mounts, err := Mounts(dir)
	if want := []string{"/dev/nvidia0", "/usr/lib/libcuda.so.1"}; err != nil || !slices.Equal(mounts, want) {
		t.Errorf("mounts %v, error %v; want %v", mounts, err, want)
	}
	files, err := Files(dir)
	if want := []string{"/usr/lib/libc.so.6"}; err != nil || !slices.Equal(files, want) {
		t.Errorf("files %v, error %v; want %v", files, err, want)
	}

	good := image(criuFilesMagic, message(map[protowire.Number]string{3: "\x32\x01/"}))
	for name, data := range map[string][]byte{
		"empty":              {},
		"of another kind":    image(criuMountsMagic),
		"cut short":          good[:len(good)-1],
		"a length cut short": append(slices.Clone(good), 1, 0),
		"no message":         image(criuFilesMagic, []byte{0xff}),
		"no text":            image(criuFilesMagic, []byte{3 << 3, 5}),
	} {
		write("files.img", data)
		if files, err := Files(dir); !errors.Is(err, ErrCRIUImage) {
			t.Errorf("%s: %v, error %v; want an ErrCRIUImage", name, files, err)
		}
	}
	if err := os.Remove(filepath.Join(dir, "files.img")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "files.img"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Files(dir); !errors.Is(err, ErrCRIUImage) {
		t.Errorf("a directory: error %v, want an ErrCRIUImage", err)
	}
}

func FuzzCRIUImage(f *testing.F) {
	f.Add(image(criuMountsMagic, message(map[protowire.Number]string{18: "/dev/nvidia0"})))
	f.Add(image(criuFilesMagic, message(map[protowire.Number]string{3: string(message(map[protowire.Number]string{6: "/x"}))})))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, kind := range []struct {
			magic uint32
			pick  func([]byte) (string, error)
		}{{criuMountsMagic, mountKey}, {criuFilesMagic, regularFile}} {
			paths, err := parseCRIU(data, kind.magic, kind.pick)
			if err != nil && paths != nil {
				t.Errorf("%q beside the error %v", paths, err)
			}
			for _, p := range paths {
				if p == "" || len(p) > len(data) {
					t.Errorf("path %q of %d bytes", p, len(data))
				}
			}
		}
	})
}
