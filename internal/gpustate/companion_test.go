// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/companion"
	"github.com/gpuckpt/gpuckpt/internal/steer"
)

// A process with a companion: its memory is taken before the driver's lock, is an area of the checkpoint
// as the driver's is, and comes back, again and again.
func TestCompanion(t *testing.T) {
	if !steer.CanSteer {
		t.Skip("a companion is for processors whose processes can be steered")
	}
	for name, place := range map[string]func(*testing.T) string{"disk": diskDir, "memory": memoryDir} {
		t.Run(name, func(t *testing.T) {
			w := startWork(t, "12M", "LD_PRELOAD="+softDir+"/"+companion.LibraryName)
			for range 2 {
				s := w.lock()
				if s.taken != 12<<20 {
					t.Fatalf("the companion has taken %d bytes", s.taken)
				}
				to := place(t)
				if err := s.Preflight(t.Context(), to); err != nil {
					t.Fatal(err)
				}
				m, err := s.Describe(time.Now())
				if err != nil {
					t.Fatal(err)
				}
				bytes, err := s.Save(t.Context(), to)
				if err != nil || bytes < 12<<20 || len(s.areas) != 2 {
					t.Fatalf("saved %d bytes in %d areas: %v", bytes, len(s.areas), err)
				}
				writer, err := s.Store(t.Context(), to, true)
				if err != nil {
					t.Fatal(err)
				}
				defer writer.Close()
				if err := s.RestoreInPlace(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := s.Unlock(t.Context()); err != nil {
					t.Fatal(err)
				}
				w.verify()
				if err := writer.Wait(); err != nil {
					t.Fatal(err)
				}
				writer.Describe(m)
				if err := images.WriteMetadata(to, m); err != nil {
					t.Fatal(err)
				}
				c, err := images.Open(to)
				if err == nil {
					err = images.Check(t.Context(), c.Areas(), 0, nil)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
}
