// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// The images of a stranger's checkpoint are split between CRIU and this package, or refused. Each
// page that the pagemap has goes one way, and is in the file at the place that it is taken from.
func FuzzPlan(f *testing.F) {
	seed := func(entries ...proto.Message) {
		dir := f.TempDir()
		writeImage(f, dir, "mm-7.img", "MM", memory(mapping(10, 20), mapping(100, 200), mapping(400, 100)))
		writeImage(f, dir, "pagemap-7.img", "PAGEMAP", append([]proto.Message{head(3)}, entries...)...)
		var parts [2][]byte
		for i, name := range []string{"mm-7.img", "pagemap-7.img"} {
			var err error
			if parts[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
				f.Fatal(err)
			}
		}
		f.Add(parts[0], parts[1], uint16(300))
	}
	seed(run(10, 5), run(100, 200), run(400, 64))
	seed(run(100, 100), run(150, 100), run(100, 200))
	seed(run(100, 1<<39), run(1<<50, 1<<39), run(400, 100))
	seed(run(100, 70), &pagemap.PagemapEntry{Vaddr: new(uint64(400 * pageBytes)), CompatNrPages: new(uint32(64))})
	f.Fuzz(func(t *testing.T, memory, pagemap []byte, have uint16) {
		dir := t.TempDir()
		for name, data := range map[string][]byte{"mm-7.img": memory, "pagemap-7.img": pagemap, "pages-3.img": make([]byte, int(have)*pageBytes)} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		set := image.Open(dir)
		p, err := NewPlan(set, least)
		if err != nil {
			return
		}
		defer p.Close()
		var total uint64
		err = set.Each("pagemap-7.img", func(e *image.Entry) error {
			if err := p.Edit(e); err != nil && err != image.ErrOmit { //nolint:errorlint // it is returned as it is
				return err
			}
			return nil
		})
		task := p.tasks["pagemap-7.img"]
		if err != nil || task == nil {
			return
		}
		if task.at > uint64(have)*pageBytes {
			t.Fatalf("%d bytes are to be taken of %d", task.at, int(have)*pageBytes)
		}
		for _, piece := range task.pieces {
			if !covers(task.spans, span{piece.Start, piece.Start + piece.Bytes}) {
				t.Fatalf("%+v is in no mapping that was chosen, %+v", piece, task.spans)
			}
			total += piece.Bytes
		}
		for _, part := range task.rest {
			total += part.Bytes
		}
		if total != task.at {
			t.Fatalf("%d of %d bytes go one way", total, task.at)
		}
	})
}
