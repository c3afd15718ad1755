// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// The thread runs the program's C library. What it asks for beyond the GPU memory of its process is its
// own affair: memory of its container, or nothing where there is no memory.
func TestAreasAreBounded(t *testing.T) {
	for name, dir := range map[string]string{"memory": "", "disk": onDisk(t)} {
		t.Run(name, func(t *testing.T) {
			g, s := newTarget(t), session(t)
			to := Target{PID: g.pid(), TID: g.pid(), Name: "gpu-", Most: largeBytes}
			if dir != "" {
				to = throughTo(g, dir)
				to.Most = largeBytes
			}
			if err := s.Steer(to); err != nil {
				t.Fatal(err)
			}
			g.ask(mapOrder(stagingFlags))
			// Together they are too much.
			got := g.ask(fmt.Sprintf("map %d %d", largeBytes, stagingFlags))
			if refused := got == "mmap cannot allocate memory"; refused != (dir != "") {
				t.Errorf("the target got %q", got)
			}
			if dir != "" {
				if _, err := s.Abort(); err == nil || !strings.Contains(err.Error(), "needs 268435456 at most") {
					t.Errorf("got %v, want that it is too much", err)
				}
				if left, _ := os.ReadDir(dir); len(left) != 0 {
					t.Errorf("files left: %v", left)
				}
				return
			}
			sum := g.ask("sum")
			areas, notes, err := s.Commit()
			if err != nil || len(areas) != 1 || areas[0].Bytes != areaBytes {
				t.Fatal(areas, notes, err)
			}
			if len(notes) != 1 || !strings.Contains(notes[0], "needs 268435456 at most") {
				t.Errorf("got notes %v", notes)
			}
			if now := g.ask("sum"); now != sum {
				t.Errorf("sum %s of the area that is its own, want %s", now, sum)
			}
		})
	}
}
