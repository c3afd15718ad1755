// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
)

// growing is a file all of which may be read early.
type growing struct {
	try     atomic.Int64
	settled sync.Once
	asked   chan struct{} // closed when the whole file is waited for
	done    chan error    // has why it never comes, and is closed when it is there
}

func (g *growing) AwaitEarly(context.Context, uint64, uint64) (int, error) { return g.Try(), nil }

func (g *growing) Try() int { return int(g.try.Load()) }

func (g *growing) Await(context.Context, uint64, uint64) error {
	g.settled.Do(func() { close(g.asked) })
	return <-g.done
}

// A block is digested while it arrives. It is digested once more if its file was written anew
// meanwhile, or if it was not right: then that counts.
func TestCheckEarly(t *testing.T) {
	right := bytes.Repeat([]byte("GPU state, "), (BlockBytes+1<<20)/11)
	wrong := bytes.Clone(right)
	wrong[5] ^= 1
	gone := errors.New("the registry is gone")
	for _, test := range []struct {
		name         string
		first, later []byte
		anew         bool
		never        error
		want         error
	}{
		{name: "right", first: right, later: right},
		{name: "not read again", first: right, later: wrong},
		{name: "written anew, right", first: right, later: right, anew: true},
		{name: "written anew, wrong", first: right, later: wrong, anew: true, want: ErrDamaged},
		{name: "wrong, then right", first: wrong, later: right, anew: true},
		{name: "cut short, then right", first: right[:1<<20], later: right, anew: true},
		{name: "wrong", first: wrong, later: wrong, want: ErrDamaged},
		{name: "never complete", first: right, later: right, never: gone, want: gone},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "gpu-1-0")
			write := func(data []byte) {
				t.Helper()
				if err := os.WriteFile(path, data, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			write(test.first)
			a := Area{File: "gpu-1-0", Bytes: uint64(len(right)), Digests: []string{DigestBlock(right[:BlockBytes]), DigestBlock(right[BlockBytes:])}}.In(path)
			g := &growing{asked: make(chan struct{}), done: make(chan error, 2)}
			a.Location[0].Arrival = g
			checked := make(chan error, 1)
			go func() { checked <- Check(t.Context(), []Area{a}, 0, nil) }()
			select {
			case <-g.asked:
			case err := <-checked:
				t.Fatalf("it did not wait for the whole file: %v", err)
			}
			write(test.later)
			if test.anew {
				g.try.Add(1)
			}
			if test.never != nil {
				g.done <- test.never
			}
			close(g.done)
			if err := <-checked; !errors.Is(err, test.want) || test.want == nil && err != nil {
				t.Errorf("got %v, want %v", err, test.want)
			}
		})
	}
}
