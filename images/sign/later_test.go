// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package sign_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// manifestOf returns the manifest of a sealed dump with a file of three blocks, the last of 5 bytes.
func manifestOf(t *testing.T) (m *sign.Manifest, dir, large string) {
	t.Helper()
	s := signer(t)
	dir = dump(t)
	large = filepath.Join(dir, "pages-2.img")
	write(t, large, nil)
	if err := os.Truncate(large, 2*images.BlockBytes+5); err != nil {
		t.Fatal(err)
	}
	if err := sign.Write(t.Context(), dir, s, nil, nil); err != nil {
		t.Fatal(err)
	}
	m, err := sign.Parse(read(t, filepath.Join(dir, sign.ManifestName)))
	if err != nil {
		t.Fatal(err)
	}
	return m, dir, large
}

func list(t *testing.T, dir string) []images.File {
	t.Helper()
	files, err := images.ListDirs(dir)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func isLarge(f images.File) bool { return f.Bytes >= images.BlockBytes }

// begun returns what is left to compare, begun, and a channel with what Begin says at its end.
func begun(t *testing.T, m *sign.Manifest, dir string) (*sign.Later, chan error) {
	t.Helper()
	l, err := m.CheckNow(t.Context(), list(t, dir), isLarge)
	if err != nil || l == nil {
		t.Fatalf("got %v, %v", l, err)
	}
	over := make(chan error, 1)
	l.Begin(func(err error) { over <- err })
	t.Cleanup(l.Close)
	return l, over
}

func change(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{1}, at); err != nil {
		t.Fatal(err)
	}
}

// A file that is compared later is right if its bytes are; all others are compared at once.
func TestLater(t *testing.T) {
	m, dir, large := manifestOf(t)
	l, over := begun(t, m, dir)
	if names := l.Names(); len(names) != 1 || names[0] != "pages-2.img" {
		t.Errorf("left are %q", names)
	}
	if err := errors.Join(l.Need(t.Context(), "pages-2.img", 0, images.BlockBytes+1), l.Need(t.Context(), "another", 0, 1), l.Wait(t.Context()), <-over); err != nil {
		t.Error(err)
	}
	l.Close()
	l.Close()
	for name := range contents {
		if images.IsAreaFile(name) {
			continue
		}
		write(t, filepath.Join(dir, name), append(contents[name], 1))
		if _, err := m.CheckNow(t.Context(), list(t, dir), isLarge); !errors.Is(err, sign.ErrChanged) {
			t.Errorf("%s has changed: %v", name, err)
		}
		write(t, filepath.Join(dir, name), contents[name])
	}
	if err := os.Truncate(large, 2*images.BlockBytes+6); err != nil {
		t.Fatal(err)
	}
	if _, err := m.CheckNow(t.Context(), list(t, dir), isLarge); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("a byte too many: %v", err)
	}
}

// A changed byte in each of the blocks is found: by Wait, and by Need of that block alone.
func TestLaterChanged(t *testing.T) {
	for block := range int64(3) {
		m, dir, large := manifestOf(t)
		change(t, large, block*images.BlockBytes+4)
		l, over := begun(t, m, dir)
		// Each block's first byte but the wrong one's, which is not asked for here.
		for other := range uint64(3) {
			err := l.Need(t.Context(), "pages-2.img", other*images.BlockBytes, other*images.BlockBytes+1)
			switch {
			case other == uint64(block) && (!errors.Is(err, sign.ErrChanged) || !strings.Contains(err.Error(), "pages-2.img has other bytes")):
				t.Errorf("block %d: Need: %v", block, err)
			case other != uint64(block) && err != nil:
				t.Errorf("block %d: block %d: %v", block, other, err)
			}
		}
		for how, err := range map[string]error{"Wait": l.Wait(t.Context()), "Begin": <-over} {
			if !errors.Is(err, sign.ErrChanged) {
				t.Errorf("block %d: %s: %v", block, how, err)
			}
		}
	}
}

// What is given up is not right.
func TestLaterGivenUp(t *testing.T) {
	m, dir, large := manifestOf(t)
	const blocks = 64 // which take longer to read than Close takes
	if err := os.Truncate(large, blocks*images.BlockBytes); err != nil {
		t.Fatal(err)
	}
	for i, f := range m.Files {
		if f.Name == filepath.Base(large) {
			m.Files[i].Bytes, m.Files[i].Digests = blocks*images.BlockBytes, slices.Repeat([]string{images.ZeroBlockDigest}, blocks)
		}
	}
	l, over := begun(t, m, dir)
	l.Close()
	for how, err := range map[string]error{"Wait": l.Wait(t.Context()), "Begin": <-over, "Need": l.Need(t.Context(), "pages-2.img", 0, blocks*images.BlockBytes)} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v", how, err)
		}
	}
}

// never is bytes that do not arrive.
type never struct{}

func (never) Await(ctx context.Context, _, _ uint64) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

// The end of a restore's context ends the wait for memory that does not arrive.
func TestLaterArrivesNever(t *testing.T) {
	const name = "pages-3.img"
	f := images.File{Name: name, Bytes: images.BlockBytes, Pieces: images.Location{{Path: "blob", Bytes: images.BlockBytes, Arrival: never{}}}}
	m := &sign.Manifest{Version: 1, Files: []sign.File{{Name: name, Bytes: f.Bytes, Digests: []string{images.ZeroBlockDigest}}}}
	for how, wait := range map[string]func(context.Context, *sign.Later) error{
		"Wait": func(ctx context.Context, l *sign.Later) error { return l.Wait(ctx) },
		"Need": func(ctx context.Context, l *sign.Later) error { return l.Need(ctx, name, 0, 1) },
	} {
		l, err := m.CheckNow(t.Context(), []images.File{f}, func(images.File) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		l.Begin(func(error) {})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := wait(ctx, l); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v", how, err)
		}
		l.Close()
	}
}

// A size that nobody has compared takes no memory.
func TestSizesAreComparedFirst(t *testing.T) {
	m, dir, _ := manifestOf(t)
	files := list(t, dir)
	for i := range 1000 {
		files = append(files, images.File{Name: fmt.Sprintf("pages-%d.img", i+100), Bytes: 1 << 48})
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := m.Check(t.Context(), files); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("got %v", err)
	}
	runtime.ReadMemStats(&after)
	if bytes := after.TotalAlloc - before.TotalAlloc; bytes > 16<<20 {
		t.Errorf("%d bytes were allocated", bytes)
	}
}

// A Later of nothing is nil, and has nothing against anything.
func TestLaterNothing(t *testing.T) {
	m, dir, _ := manifestOf(t)
	none, err := m.CheckNow(t.Context(), list(t, dir), func(images.File) bool { return false })
	if none != nil || err != nil {
		t.Fatalf("got %v, %v", none, err)
	}
	if err := errors.Join(none.Need(t.Context(), "a", 0, 1), none.Wait(t.Context())); err != nil || none.Names() != nil {
		t.Errorf("of nothing: %v", err)
	}
	none.Close()
}
