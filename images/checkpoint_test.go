// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// layers are an unpacked image's: pages-1.img and gpuckpt.json on top, the
// area's two pieces each in one below, with a gap between them.
func layers(t *testing.T) (roots []string, content []byte) {
	t.Helper()
	content = bytes.Repeat([]byte("GPU memory of 16"), 6<<20/16)
	copy(content[2<<20:], make([]byte, 2<<20))
	m := sample()
	m.Processes[0].Areas[0] = Area{File: "gpu-1-0", Start: 0x7f0000000000, Bytes: uint64(len(content)), Digests: []string{DigestBlock(content)}}
	for range 4 {
		roots = append(roots, t.TempDir())
	}
	for i := range 3 {
		if err := os.Mkdir(filepath.Join(roots[i], ImageDir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	put(t, filepath.Join(roots[0], ImageDir, "pages-1.img"), []byte("pages"))
	put(t, filepath.Join(roots[1], ImageDir, PieceFile("gpu-1-0", 0)), content[:2<<20])
	put(t, filepath.Join(roots[2], ImageDir, PieceFile("gpu-1-0", 4<<20)), content[4<<20:])
	if err := WriteMetadata(filepath.Join(roots[0], ImageDir), m); err != nil {
		t.Fatal(err)
	}
	return roots, content
}

func put(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestOpenImage(t *testing.T) {
	roots, content := layers(t)
	c, err := OpenImage("", roots...)
	if err != nil {
		t.Fatal(err)
	}
	if c.Dir != filepath.Join(roots[0], ImageDir) || len(c.Files) != 2 || len(c.Areas()[0].Location) != 2 {
		t.Errorf("got %+v", c)
	}
	if err := Check(t.Context(), c.Areas(), 0, nil); err != nil {
		t.Error(err)
	}
	got := make([]byte, len(content))
	r := c.Metadata.Processes[0].Areas[0].Open(t.Context())
	defer r.Close()
	if _, err := r.ReadAt(got, 0); err != nil || !bytes.Equal(got, content) {
		t.Errorf("read %v", err)
	}
	if at := r.NextData(3 << 20); at != 4<<20 {
		t.Errorf("the next data behind 3 MiB is at %d", at)
	}
	// All in one directory, as a merged root file system shows it.
	for i := 1; i < 3; i++ {
		dir := filepath.Join(roots[i], ImageDir)
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if err := os.Rename(filepath.Join(dir, e.Name()), filepath.Join(c.Dir, e.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	if c, err = OpenImage("", roots[0]); err != nil {
		t.Fatal(err)
	}
	if err := Check(t.Context(), c.Areas(), 0, nil); err != nil {
		t.Error(err)
	}
}

// verify opens a flat checkpoint and checks its GPU state.
func verify(t *testing.T, dir string, progress Progress) error {
	t.Helper()
	c, err := Open(dir)
	if err != nil {
		return err
	}
	return Check(t.Context(), c.Areas(), 0, progress)
}

func TestOtherImagesAreNone(t *testing.T) {
	if dirs, err := ImageDirs(t.TempDir(), t.TempDir()); err != nil || dirs != nil {
		t.Errorf("got %v, %v", dirs, err)
	}
	if _, err := OpenImage("", t.TempDir()); !errors.Is(err, ErrNoMetadata) {
		t.Errorf("got %v", err)
	}
	// A layer above has removed the checkpoint.
	roots, _ := layers(t)
	above := t.TempDir()
	if err := unix.Mknod(filepath.Join(above, ImageDir), unix.S_IFCHR, 0); err != nil {
		t.Skip("a whiteout cannot be made here: ", err)
	}
	if dirs, err := ImageDirs(append([]string{above}, roots...)...); err != nil || dirs != nil {
		t.Errorf("got %v, %v", dirs, err)
	}
}

func TestOpenRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(t *testing.T, roots []string)
		says   string
	}{
		"metadata gone":  {func(t *testing.T, r []string) { drop(t, r[0], MetadataName) }, "has no " + MetadataName},
		"top layer gone": {func(t *testing.T, r []string) { os.RemoveAll(filepath.Join(r[0], ImageDir)) }, "has no " + MetadataName},
		"a link": {func(t *testing.T, r []string) {
			drop(t, r[0], "pages-1.img")
			os.Symlink("/etc/passwd", filepath.Join(r[0], ImageDir, "pages-1.img"))
		}, "pages-1.img is not a regular file"},
		"a directory": {func(t *testing.T, r []string) { os.Mkdir(filepath.Join(r[0], ImageDir, "sub"), 0o700) }, "sub is not a regular file"},
		"a FIFO":      {func(t *testing.T, r []string) { unix.Mkfifo(filepath.Join(r[0], ImageDir, "x.img"), 0o600) }, "x.img is not a regular file"},
		"a piece cut": {func(t *testing.T, r []string) {
			os.Truncate(filepath.Join(r[1], ImageDir, PieceFile("gpu-1-0", 0)), 5000)
		}, "is truncated"},
		"a piece of no page": {func(t *testing.T, r []string) {
			os.Truncate(filepath.Join(r[1], ImageDir, PieceFile("gpu-1-0", 0)), 100)
		}, "nor says which blob"},
		"a piece empty": {func(t *testing.T, r []string) { os.Truncate(filepath.Join(r[1], ImageDir, PieceFile("gpu-1-0", 0)), 0) }, "nor says which blob"},
		"a piece too long": {func(t *testing.T, r []string) {
			os.Truncate(filepath.Join(r[1], ImageDir, PieceFile("gpu-1-0", 0)), 5<<20)
		}, "is not a piece"},
		"a piece askew": {func(t *testing.T, r []string) {
			put(t, filepath.Join(r[1], ImageDir, PieceFile("gpu-1-0", 4096)), make([]byte, 4096))
		}, "is not a piece"},
		"a piece behind": {func(t *testing.T, r []string) {
			put(t, filepath.Join(r[1], ImageDir, PieceFile("gpu-1-0", 64<<20)), make([]byte, 4096))
		}, "is not a piece"},
		"another area": {func(t *testing.T, r []string) {
			put(t, filepath.Join(r[1], ImageDir, PieceFile("gpu-1-1", 0)), make([]byte, 4096))
		}, "belongs to no area"},
		"a whole file beside": {func(t *testing.T, r []string) { put(t, filepath.Join(r[1], ImageDir, "gpu-1-0"), make([]byte, 4096)) }, "is not a piece"},
	} {
		t.Run(name, func(t *testing.T) {
			roots, _ := layers(t)
			c.damage(t, roots)
			if _, err := OpenImage("", roots...); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
	// What opening does not see, checking does.
	for i := 1; i < 3; i++ {
		roots, _ := layers(t)
		if err := os.RemoveAll(filepath.Join(roots[i], ImageDir)); err != nil {
			t.Fatal(err)
		}
		c, err := OpenImage("", roots...)
		if err != nil {
			t.Fatal(err)
		}
		var wrong *BlockError
		if err := Check(t.Context(), c.Areas(), 0, nil); !errors.As(err, &wrong) || wrong.Area != "gpu-1-0" {
			t.Errorf("a piece missing: %v", err)
		}
	}
}

// Who looks for a signature among the files takes no memory for any number of them.
func TestTooManyFiles(t *testing.T) {
	dirs := make([]string, 2)
	for i := range dirs {
		dir, err := os.MkdirTemp("/dev/shm", "gpuckpt-test-") // where that takes a second
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		dirs[i] = dir
		put(t, filepath.Join(dir, "0"), nil)
	}
	for i := range maxFiles - 2 {
		if err := os.Link(filepath.Join(dirs[0], "0"), filepath.Join(dirs[0], fmt.Sprint("a", i))); err != nil {
			t.Fatal(err)
		}
	}
	if files, err := ListDirs(dirs...); err != nil || len(files) != maxFiles-1 { // the other directory's is hidden
		t.Errorf("%d files, %v", len(files), err)
	}
	put(t, filepath.Join(dirs[1], "1"), nil)
	if _, err := ListDirs(dirs...); !errors.Is(err, ErrDamaged) {
		t.Errorf("one more: %v", err)
	}
}

// A piece may be a blob of its own, which the image points to.
func TestPointer(t *testing.T) {
	const size = 2 << 20
	at := func(r []string) string { return filepath.Join(r[1], ImageDir, PieceFile("gpu-1-0", 0)) }
	pointer := func(t *testing.T, r []string) (blobs string, to Pointer) {
		t.Helper()
		second := PieceFile("gpu-1-0", 4<<20) // what is below a pointer is none of the checkpoint's
		if err := os.Rename(filepath.Join(r[2], ImageDir, second), filepath.Join(r[1], ImageDir, second)); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(at(r))
		if err != nil {
			t.Fatal(err)
		}
		to = Pointer{Digest: digest.FromBytes(data), Bytes: uint64(len(data))}
		blobs = t.TempDir()
		put(t, filepath.Join(blobs, to.Digest.Encoded()), data)
		put(t, at(r), []byte(to.String()))
		return blobs, to
	}
	roots, _ := layers(t)
	blobs, to := pointer(t, roots)
	c, err := OpenImage(blobs, roots...)
	if err != nil {
		t.Fatal(err)
	}
	if p := c.Areas()[0].Location[0]; p.Path != filepath.Join(blobs, to.Digest.Encoded()) || p.Bytes != size {
		t.Errorf("the piece is %+v", p)
	}
	if err := Check(t.Context(), c.Areas(), 0, nil); err != nil {
		t.Error(err)
	}
	// What is below is the container's own, whatever it is called.
	put(t, filepath.Join(roots[2], ImageDir, PieceFile("pages-9.img", 0)), make([]byte, PageBytes))
	put(t, filepath.Join(roots[2], ImageDir, PieceFile("gpu-1-0", 2<<20)), make([]byte, PageBytes))
	if c, err = OpenImage(blobs, roots...); err != nil || c.file("pages-9.img") != nil {
		t.Errorf("above files of such names: %v", err)
	}
	if err := Check(t.Context(), c.Areas(), 0, nil); err != nil {
		t.Errorf("above files of such names: %v", err)
	}
	t.Chdir(blobs)
	if _, err := OpenImage("", roots...); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "is not known") {
		t.Errorf("without a directory of blobs: %v", err)
	}
	for name, bad := range map[string]struct {
		damage func(t *testing.T, blobs string, to Pointer, r []string)
		says   string
	}{
		"it is not there": {func(t *testing.T, blobs string, to Pointer, _ []string) {
			os.Remove(filepath.Join(blobs, to.Digest.Encoded()))
		}, "gpuckpt image pull"},
		"it is shorter": {func(t *testing.T, blobs string, to Pointer, _ []string) {
			os.Truncate(filepath.Join(blobs, to.Digest.Encoded()), size-4096)
		}, "no file of"},
		"it is a link": {func(t *testing.T, blobs string, to Pointer, _ []string) {
			path := filepath.Join(blobs, to.Digest.Encoded())
			os.Rename(path, path+"x")
			os.Symlink(path+"x", path)
		}, "no file of"},
		"elsewhere": {func(t *testing.T, _ string, _ Pointer, r []string) {
			put(t, at(r), []byte("sha256:../../../etc/passwd 2097152\n"))
		}, "nor says which blob"},
		"another digest": {func(t *testing.T, _ string, _ Pointer, r []string) {
			put(t, at(r), []byte("sha512:"+strings.Repeat("0a", 64)+" 2097152\n"))
		}, "nor says which blob"},
		"more behind it": {func(t *testing.T, _ string, to Pointer, r []string) { put(t, at(r), []byte(to.String()+"x")) }, "nor says which blob"},
		"no page": {func(t *testing.T, _ string, to Pointer, r []string) {
			put(t, at(r), []byte(Pointer{to.Digest, 100}.String()))
		}, "nor says which blob"},
	} {
		t.Run(name, func(t *testing.T) {
			roots, _ := layers(t)
			blobs, to := pointer(t, roots)
			bad.damage(t, blobs, to, roots)
			if _, err := OpenImage(blobs, roots...); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), bad.says) {
				t.Errorf("got %v, want %q", err, bad.says)
			}
		})
	}
}

// Memory that an image has in pieces is one file, as long as its last piece says.
func TestMemoryInPieces(t *testing.T) {
	roots, _ := layers(t)
	whole := filepath.Join(roots[0], ImageDir, "pages-1.img")
	data := bytes.Repeat([]byte{7}, PieceAlign+PageBytes)
	put(t, filepath.Join(roots[1], ImageDir, PieceFile("pages-1.img", 0)), data[:PieceAlign])
	put(t, filepath.Join(roots[1], ImageDir, PieceFile("pages-1.img", 2*PieceAlign)), data[PieceAlign:])
	if _, err := OpenImage("", roots...); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "whole and in pieces") {
		t.Errorf("beside the whole file: %v", err)
	}
	if err := os.Remove(whole); err != nil {
		t.Fatal(err)
	}
	c, err := OpenImage("", roots...)
	if err != nil {
		t.Fatal(err)
	}
	f := c.file("pages-1.img")
	if f == nil || f.Bytes != 2*PieceAlign+PageBytes || len(f.Pieces) != 2 {
		t.Fatalf("got %+v", f)
	}
	r, err := f.Reader(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	got := make([]byte, f.Bytes)
	if _, err := r.ReadAt(got, 0); err != nil || !bytes.Equal(got, slices.Concat(data[:PieceAlign], make([]byte, PieceAlign), data[PieceAlign:])) {
		t.Errorf("it has another content: %v", err)
	}
	put(t, filepath.Join(roots[1], ImageDir, PieceFile("pages-1.img", PieceAlign/2)), data[:PieceAlign])
	if _, err := OpenImage("", roots...); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "is not a piece of pages-1.img") {
		t.Errorf("a piece between: %v", err)
	}
	flat := t.TempDir()
	put(t, filepath.Join(flat, PieceFile("pages-9.img", 0)), data[:PieceAlign])
	if err := WriteMetadata(flat, &Metadata{SchemaVersion: SchemaVersion, Created: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(flat); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "belongs to no area") {
		t.Errorf("in a flat directory: %v", err)
	}
	for name, is := range map[string]bool{"pages-1.img": true, "pages-0.img": false, "pages-1.img.000000000000": false, "gpu-1-0": false, "inventory.img": false} {
		if IsMemory(name) != is {
			t.Errorf("%s is memory: %t", name, !is)
		}
	}
}

func FuzzPointer(f *testing.F) {
	f.Add(Pointer{Digest: digest.FromString("blob"), Bytes: 4096}.String())
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParsePointer(text)
		if err == nil && (p.String() != text || len(text) >= PageBytes || strings.ContainsAny(p.Digest.Encoded(), "./")) {
			t.Errorf("%q is taken as %+v", text, p)
		}
	})
}

func drop(t *testing.T, root, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(root, ImageDir, name)); err != nil {
		t.Fatal(err)
	}
}

func TestOpenFlat(t *testing.T) {
	_, content := layers(t)
	dir := t.TempDir()
	m := sample()
	m.Processes[0].Areas[0] = Area{File: "gpu-1-0", Start: 0x7f0000001000, Bytes: uint64(len(content)), Offset: 4096, Digests: []string{DigestBlock(content)}}
	if err := WriteMetadata(dir, m); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "gpu-1-0 is missing") {
		t.Errorf("without its area: %v", err)
	}
	path := filepath.Join(dir, "gpu-1-0")
	put(t, path, append(append(make([]byte, 4096), content...), "behind"...))
	var read uint64
	if err := verify(t, dir, func(s Step) { read = s.Done }); err != nil || read != uint64(len(content)) {
		t.Errorf("%d bytes, %v", read, err)
	}
	content[len(content)-1]++
	put(t, path, append(make([]byte, 4096), content...))
	if err := verify(t, dir, nil); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "block 0") {
		t.Errorf("damaged: %v", err)
	}
	if err := os.Truncate(path, int64(len(content))); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "truncated") {
		t.Errorf("truncated: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, MetadataName)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, AllowWithoutGPU); !errors.Is(err, ErrDamaged) {
		t.Errorf("taken for one without GPU state: %v", err)
	}
}

// Whatever the metadata and the files' names say, what is opened is in order.
func FuzzOpenFiles(f *testing.F) {
	m := sample()
	m.Processes[0].Areas[0].Bytes, m.Processes[0].Areas[0].Digests = 4096, []string{blockDigest}
	valid, err := EncodeMetadata(m)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(valid, "gpu-1-0", uint32(8192), "pages-1.img", uint32(5))
	f.Add(valid, PieceFile("gpu-1-0", 0), uint32(4096), PieceFile("gpu-1-0", 2<<20), uint32(4096))
	f.Fuzz(func(t *testing.T, data []byte, one string, oneBytes uint32, two string, twoBytes uint32) {
		data = reseal(data)
		zeros := bytes.NewReader(make([]byte, 1<<16))
		c, err := OpenFiles([]File{
			{Name: MetadataName, Path: MetadataName, Bytes: uint64(len(data)), Data: bytes.NewReader(data)},
			{Name: one, Path: one, Bytes: uint64(oneBytes), Data: zeros}, {Name: two, Path: two, Bytes: uint64(twoBytes), Data: zeros},
		})
		if err != nil {
			return
		}
		for _, a := range c.Areas() {
			var at uint64
			for _, p := range a.Location {
				if p.Offset < at || p.Bytes == 0 || p.Offset+p.Bytes > a.End() {
					t.Fatalf("pieces of %+v", a)
				}
				at = p.Offset + p.Bytes
			}
		}
		if c.AreaBytes() < 1<<20 {
			_ = Check(t.Context(), c.Areas(), 0, nil)
		}
	})
}

func ExampleOpenImage() {
	// An unpacked image's layers, the topmost first, as in an overlay's
	// lowerdir.
	checkpoint, err := OpenImage("/content/blobs/sha256", "/layers/2/fs", "/layers/1/fs")
	if errors.Is(err, ErrNoMetadata) {
		fmt.Println("no checkpoint")
		return
	}
	if err != nil {
		panic(err)
	}
	fmt.Println("CRIU's images are in", checkpoint.Dir)
	if err := Check(context.Background(), checkpoint.Areas(), 0, nil); err != nil {
		panic(err) // a file was damaged
	}
	// Output: no checkpoint
}
