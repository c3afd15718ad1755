// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// tmpfs mounts a tmpfs with options.
func tmpfs(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("gpuckpt-test", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("a tmpfs cannot be mounted: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// pagesOf returns how many bytes of pages a file has, and its inode.
func pagesOf(t *testing.T, path string) (bytes int64, inode uint64) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512, st.Ino
}

// The pages that were made ahead are the image's: all of them, a part, and more than it needs. Nothing
// else is in the directory meanwhile.
func TestRoom(t *testing.T) {
	for _, options := range []string{"huge=never", "huge=advise"} {
		for _, made := range []int64{300, 10, 600} { // pages
			dir := tmpfs(t, options)
			d, content, _ := dumped(t, dir)
			before := files(t, dir)
			h := d.of[self()]
			runs := h.runs
			switch made {
			case 10:
				h.runs = []span{{runs[0].Start, runs[0].Start + 10*pageBytes}}
			case 600:
				h.runs = append(h.runs[:len(runs):len(runs)], runs...)
			}
			d.makeRoom(self(), dir)
			r := h.room
			if r == nil {
				t.Fatal("there is no room")
			}
			r.left.Wait()
			path := fmt.Sprintf("/proc/self/fd/%d", r.f.Fd())
			ahead, inode := pagesOf(t, path)
			if ahead < made*pageBytes {
				t.Errorf("%d bytes are made ahead, want %d", ahead, made*pageBytes)
			}
			if files(t, dir) != before {
				t.Error("the room can be seen")
			}
			h.runs = runs
			done, err := d.merge(self(), 7, dir, made != 10)
			if err != nil || done.Bytes != uint64(len(content)) || done.Ahead != uint64(made)*pageBytes {
				t.Fatalf("%+v, %v", done, err)
			}
			image := filepath.Join(dir, "pages-3.img")
			if after, is := pagesOf(t, image); is != inode || after > 308*pageBytes+mmapfile.HugePage {
				t.Errorf("the image has %d bytes of pages; is the room: %t", after, is == inode)
			}
			if data, err := os.ReadFile(image); err != nil || len(data) != 308*pageBytes || !bytes.Equal(data[5*pageBytes:305*pageBytes], content) {
				t.Errorf("the image has %d bytes, or other ones: %v", len(data), err)
			}
			if left, err := filepath.Glob(filepath.Join(dir, temporary+"*")); err != nil || len(left) > 0 {
				t.Errorf("left are %v, %v", left, err)
			}
		}
	}
}

// No pages are made on a disk, nor where the memory has too few to be worth it.
func TestNoRoom(t *testing.T) {
	d, content, _ := dumped(t, t.TempDir())
	h := d.of[self()]
	if d.makeRoom(self(), t.TempDir()); h.room != nil {
		t.Error("pages are made on a disk")
	}
	for i := range 150 {
		clear(content[i*2*pageBytes : (i*2+1)*pageBytes])
	}
	h.done = false
	if d.makeRoom(self(), tmpfs(t, "")); h.room != nil {
		t.Error("pages are made for zeros")
	}
	if h.runs = []span{{8, 8 + pageBytes}}; !h.hasZeros(pageBytes) {
		t.Error("memory that cannot be read has no zeros")
	}
}

// A tmpfs that has no room for all pages has those that it has room for, and is as empty as before when
// nobody has taken them.
func TestRoomFull(t *testing.T) {
	dir := tmpfs(t, "size=512k")
	d, _, _ := dumped(t, t.TempDir())
	d.makeRoom(self(), dir)
	r := d.of[self()].room
	if r == nil {
		t.Fatal("there is no room")
	}
	r.left.Wait()
	r.close()
	r.close()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Bfree != st.Blocks {
		t.Errorf("%d of %d blocks are free, %v", st.Bfree, st.Blocks, err)
	}
}

// Zeros become holes where the file had pages before.
func TestHolesInPages(t *testing.T) {
	f, err := os.Create(filepath.Join(tmpfs(t, "huge=never"), "pages"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, 200*pageBytes); err != nil {
		t.Fatal(err)
	}
	to, err := newPagesFile(f, 100*pageBytes, true)
	if err != nil {
		t.Fatal(err)
	}
	defer to.close()
	content := make([]byte, 100*pageBytes)
	copy(content[30*pageBytes:], bytes.Repeat([]byte{7}, 10*pageBytes))
	if err := to.write(content, 0); err != nil {
		t.Fatal(err)
	}
	if has, _ := pagesOf(t, f.Name()); has != 10*pageBytes {
		t.Errorf("it has %d bytes of pages, want %d", has, 10*pageBytes)
	}
	if got, err := os.ReadFile(f.Name()); err != nil || !bytes.Equal(got, content) {
		t.Errorf("it has other bytes, %v", err)
	}
}
