// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// Disk holds for the file that says so, whatever the others say.
func TestDigestsOfMemoryAndDisk(t *testing.T) {
	memory, err := os.MkdirTemp("/dev/shm", "gpuckpt-staging-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(memory) })
	disk, err := os.MkdirTemp("/var/tmp", "gpuckpt-staging-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(disk) })
	content := bytes.Repeat([]byte("GPU state, "), HugePage)[:2*HugePage+PageSize]
	var files []FileRange
	for i, dir := range []string{memory, disk, memory} {
		path := filepath.Join(dir, string(rune('a'+i)))
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, FileRange{Path: path, Offset: PageSize, Bytes: 2 * HugePage, Disk: dir == disk})
	}
	want := images.DigestBlock(content[PageSize:])
	for range 2 {
		digests, err := digestAll(files)
		if err != nil {
			t.Fatal(err)
		}
		for i, d := range digests {
			if len(d) != 1 || d[0] != want {
				t.Errorf("%s: got %v, want %s", files[i].Path, d, want)
			}
		}
		files[0], files[1] = files[1], files[0]
	}
	files[0].Bytes *= 2
	if _, err := digestAll(files); err == nil {
		t.Error("a file that is cut short was digested")
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte(`{"op":"digest","files":[{"path":"/x","offset":4096,"bytes":8192,"disk":true}]}`))
	f.Add([]byte(`{"op":"check","areas":[],"places":[]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var q request
		if err := worker.Decode(body, &q); err != nil {
			return
		}
		for _, r := range q.Files {
			if r.Bytes == 0 || (r.Offset|r.Bytes)%PageSize != 0 || r.Offset >= HugePage {
				t.Fatalf("accepted %+v", r)
			}
		}
	})
}

// What was digested behind the driver is digested again where it has changed, and only
// there.
func TestKnownBlocks(t *testing.T) {
	const size = 3 * images.BlockBytes
	path := filepath.Join(t.TempDir(), "area")
	content := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{3}).Read(content)
	known := make([]Known, 3)
	for i := range known[:2] {
		known[i] = know(content[i*images.BlockBytes:(i+1)*images.BlockBytes], new(atomic.Bool))
		if known[i].Digest != images.DigestBlock(content[i*images.BlockBytes:(i+1)*images.BlockBytes]) {
			t.Errorf("block %d: the digest is wrong", i)
		}
	}
	content[images.BlockBytes+7] ^= 1
	want := []string{"kept", images.DigestBlock(content[images.BlockBytes : 2*images.BlockBytes]), images.DigestBlock(content[2*images.BlockBytes:])}
	known[0].Digest = "kept" // so that it is seen
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := digestAll([]FileRange{{Path: path, Bytes: size, Written: known}})
	if err != nil || !slices.Equal(got[0], want) {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	stop := new(atomic.Bool)
	stop.Store(true)
	if k := know(content, stop); k != (Known{}) {
		t.Errorf("stopped: %v", k)
	}
}

// What a GPU has computed is taken, but for the first and the last block, which must be as the file has them.
func TestComputedBlocks(t *testing.T) {
	const size = 2*images.BlockBytes + 2<<20
	path := filepath.Join(t.TempDir(), "area")
	content := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{4}).Read(content)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	first, last := images.DigestBlock(content[:images.BlockBytes]), images.DigestBlock(content[2*images.BlockBytes:])
	each := map[string]func(FileRange) ([][]string, error){
		"digest": func(r FileRange) ([][]string, error) { return digestAll([]FileRange{r}) },
		"copy": func(r FileRange) ([][]string, error) {
			r.To = filepath.Join(t.TempDir(), "to")
			digests, err := copyAll([]FileRange{r})
			if got, rerr := os.ReadFile(r.To); err == nil && (rerr != nil || !bytes.Equal(got, content)) {
				t.Errorf("the copy differs: %v", rerr)
			}
			return digests, err
		},
	}
	for name, do := range each {
		want := []string{first, "computed", last}
		got, err := do(FileRange{Path: path, Bytes: size, Computed: want})
		if err != nil || !slices.Equal(got[0], want) {
			t.Errorf("%s: got %q, %v, want %q", name, got, err, want)
		}
		for _, computed := range [][]string{{last, "computed", last}, {first, "computed", first}} {
			if _, err := do(FileRange{Path: path, Bytes: size, Computed: computed}); err == nil || !strings.Contains(err.Error(), "the copy is wrong") {
				t.Errorf("%s: a GPU that had other bytes: %v", name, err)
			}
		}
	}
}
