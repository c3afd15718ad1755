// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package digestcheck

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
)

func TestMain(m *testing.M) {
	if staging.IsDigester() {
		staging.DigesterMain()
		return
	}
	os.Exit(m.Run())
}

// digesters starts digesters, and remembers them.
type digesters struct{ all []*staging.Digester }

func (d *digesters) start(context.Context) (*staging.Digester, error) {
	w, err := staging.StartDigester(nil, nil)
	d.all = append(d.all, w)
	return w, err
}

// ended fails the test unless so many digesters were started, and all have ended.
func (d *digesters) ended(t *testing.T, count int) {
	t.Helper()
	if len(d.all) != count {
		t.Errorf("%d digesters were started, want %d", len(d.all), count)
	}
	for _, w := range d.all {
		select {
		case <-w.Done():
		default:
			t.Error("a digester is there and has nothing to do")
		}
	}
}

// area is a file of a few blocks.
func area(t *testing.T) images.Area {
	t.Helper()
	const bytes = images.BlockBytes + 4<<20
	path := filepath.Join(t.TempDir(), "area")
	data := make([]byte, bytes)
	for i := range data {
		data[i] = byte(i >> 12)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return images.Area{
		File: "area", Bytes: bytes, Location: images.Location{{Path: path, Bytes: bytes}},
		Digests: []string{images.DigestBlock(data[:images.BlockBytes]), images.DigestBlock(data[images.BlockBytes:])},
	}
}

// What is added is compared, also what somebody else was to compare and has not. The digesters end.
func TestCheck(t *testing.T) {
	right, wrong := area(t), area(t)
	wrong.Digests[1] = right.Digests[0]
	for _, c := range []struct {
		name      string
		begin     []images.Area
		unless    []images.Area
		compared  bool
		digesters int
		lost      bool
	}{
		{name: "nothing"},
		{name: "right", begin: []images.Area{right}, digesters: 1},
		{name: "wrong", begin: []images.Area{right, wrong}, digesters: 1, lost: true},
		{name: "compared by others", unless: []images.Area{wrong}, compared: true},
		{name: "left by others, right", begin: []images.Area{right}, unless: []images.Area{right}, digesters: 2},
		{name: "left by others, wrong", unless: []images.Area{wrong}, digesters: 1, lost: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var d digesters
			check := New(t.Context(), d.start)
			defer check.Close()
			if err := check.Begin(c.begin); err != nil {
				t.Fatal(err)
			}
			check.BeginUnless(c.unless, func() bool { return c.compared })
			if err := check.Wait(); errors.Is(err, errdefs.ErrDataLoss) != c.lost || !c.lost && err != nil {
				t.Errorf("it ends with %v", err)
			}
			d.ended(t, c.digesters)
		})
	}
}

// Close ends a digester that is at work, and a check that cannot begin is an error.
func TestCheckEnds(t *testing.T) {
	var d digesters
	check := New(t.Context(), d.start)
	if err := check.Begin([]images.Area{area(t)}); err != nil {
		t.Fatal(err)
	}
	check.Close()
	d.ended(t, 1)

	// What others leave to it afterwards is not begun.
	check = New(t.Context(), d.start)
	left := make(chan struct{})
	check.BeginUnless([]images.Area{area(t)}, func() bool { <-left; return false })
	check.Close()
	close(left)
	if err := check.Wait(); err == nil {
		t.Error("it has compared what was left to it after its end")
	}
	d.ended(t, 1)

	none := errors.New("no digester")
	check = New(t.Context(), func(context.Context) (*staging.Digester, error) { return nil, none })
	defer check.Close()
	if err := check.Begin([]images.Area{area(t)}); !errors.Is(err, none) {
		t.Errorf("it begins with %v", err)
	}
	check.BeginUnless([]images.Area{area(t)}, func() bool { return false })
	if err := check.Wait(); !errors.Is(err, none) {
		t.Errorf("it ends with %v", err)
	}
}
