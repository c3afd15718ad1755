// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/interposer"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
)

// A process with an interposer: its memory is taken before the driver's checkpoint, is an area of the checkpoint
// as the driver's is, and comes back, again and again.
func TestInterposer(t *testing.T) {
	if !steer.CanSteer {
		t.Skip("an interposer is for processors whose processes can be steered")
	}
	for name, place := range map[string]func(*testing.T) string{"disk": diskDir, "memory": memoryDir} {
		t.Run(name, func(t *testing.T) {
			w := startWork(t, "12M", "LD_PRELOAD="+softDir+"/"+interposer.LibraryName)
			for range 2 {
				s := w.lock()
				if s.parked == nil || s.parked.Bytes != 12<<20 {
					t.Fatalf("the interposer has parked %+v", s.parked)
				}
				to := place(t)
				if err := s.Preflight(t.Context(), to); err != nil {
					t.Fatal(err)
				}
				m, err := s.Describe(time.Now())
				if err != nil {
					t.Fatal(err)
				}
				bytes, err := s.Save(t.Context(), to, Suspended)
				if err != nil || bytes != bytesOf(s.areas) || len(s.areas) != 2 {
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

// Whatever fails of a Save, the program has its memory and its lock as before, and the next Save is good:
// also in the same pause, and of memory that the interposer has saved or kept already.
func TestInterposerUndone(t *testing.T) {
	if !steer.CanSteer {
		t.Skip("an interposer is for processors whose processes can be steered")
	}
	for _, test := range []struct{ fault, words string }{
		{"fail=unlock:304:1", "unlock"},
		{"fail=lock:304:1", "lock"},
		{"fail=lock:304", "on the way back"},
		{"fail=checkpoint:304:1", "checkpoint"},
	} {
		for _, keep := range []bool{false, true} {
			t.Run(fmt.Sprint(test.fault, " ", keep), func(t *testing.T) {
				faults := filepath.Join(t.TempDir(), "faults")
				inject := func(text string) {
					if err := os.WriteFile(faults, []byte(text), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				inject("")
				w := startWork(t, "12M", "LD_PRELOAD="+softDir+"/"+interposer.LibraryName, "SOFTCUDA_CONF="+faults)
				s, dir := w.lock(), memoryDir(t)
				inject(test.fault)
				if err := s.Preflight(t.Context(), dir); err != nil {
					t.Fatal(err)
				}
				if _, err := s.Save(t.Context(), dir, next(keep)); err == nil || !strings.Contains(err.Error(), test.words) || s.Phase() != Locked {
					t.Fatalf("%v: %v", s.Phase(), err)
				}
				inject("")
				for range 2 { // the second has the interposer save what it has saved
					if n, err := s.Save(t.Context(), memoryDir(t), next(keep)); err != nil || n < 12<<20 || len(s.areas) != 2 {
						t.Fatalf("saved %d bytes in %d areas: %v", n, len(s.areas), err)
					}
					if err := s.RestoreInPlace(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				if err := s.Unlock(t.Context()); err != nil {
					t.Fatal(err)
				}
				w.verify()
				s = w.lock()
				inject(strings.TrimSuffix(test.fault, ":1")) // always
				if err := s.Preflight(t.Context(), dir); err != nil {
					t.Fatal(err)
				}
				if _, err := s.Save(t.Context(), memoryDir(t), next(keep)); err == nil {
					t.Fatal("it did not fail")
				}
				inject("")
				if err := s.Unlock(t.Context()); err != nil {
					t.Fatal(err)
				}
				w.verify()
				if n := w.imports(); n != 0 {
					t.Errorf("%d pieces of kept memory are mapped", n)
				}
			})
		}
	}
}

// What is written through to a disk is the driver's alone.
func TestInterposerWrittenThrough(t *testing.T) {
	if !steer.CanSteer {
		t.Skip("an interposer is for processors whose processes can be steered")
	}
	w := startWork(t, "12M", "LD_PRELOAD="+softDir+"/"+interposer.LibraryName)
	s, dir := w.lock(), diskDir(t)
	if err := s.Preflight(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.path, err = keep(s.parked, writeThrough{window: 16 << 20}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Save(t.Context(), dir, Suspended); err != nil || len(s.areas) != 1 || s.areas[0].Bytes < 12<<20 {
		t.Fatalf("saved %d areas: %v", len(s.areas), err)
	}
	if err := s.RestoreInPlace(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Unlock(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.verify()
}

// ask asks the process and returns its answer.
func (w *work) ask(request string) string {
	w.t.Helper()
	buf := make([]byte, 2048)
	w.conn.SetDeadline(time.Now().Add(10 * time.Second))
	n := 0
	_, err := w.conn.Write([]byte(request))
	if err == nil {
		n, err = w.conn.Read(buf)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return string(buf[:n])
}

// gpuFiles returns how many descriptors of the software GPU's memory the process has.
func (w *work) gpuFiles() (n int) {
	w.t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", w.pid)
	files, err := os.ReadDir(dir)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range files {
		if to, _ := os.Readlink(filepath.Join(dir, f.Name())); strings.Contains(to, "softcuda-") {
			n++
		}
	}
	return n
}

// imports returns how many pieces of kept memory the process has mapped.
func (w *work) imports() (n int) {
	w.t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", w.pid))
	if err != nil {
		w.t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "rwxs") && strings.Contains(line, "softcuda") {
			n++
		}
	}
	return n
}

// next is what follows a Save that is to keep memory, or not.
func next(keep bool) Next {
	if keep {
		return Resumes
	}
	return Suspended
}

// left checkpoints the process, which is left running, and returns the metadata. The memory of its interposer
// is kept on the GPU if keep: then the process runs beside the copy out, which meanwhile sees it.
func (w *work) left(dir string, keep bool, meanwhile func()) *images.Metadata {
	w.t.Helper()
	s := w.lock()
	must := func(err error) {
		w.t.Helper()
		if err != nil {
			w.t.Fatal(err)
		}
	}
	ctx := w.t.Context()
	must(s.Preflight(ctx, dir))
	m, err := s.Describe(time.Now())
	must(err)
	_, err = s.Save(ctx, dir, next(keep))
	must(err)
	if n := w.gpuFiles(); n != 0 {
		w.t.Errorf("%d descriptors of GPU memory are left in the process", n)
	}
	writer, err := s.Store(ctx, dir, true)
	must(err)
	defer writer.Close()
	if writer.Filling() != keep {
		w.t.Errorf("memory is kept: %v, want %v", writer.Filling(), keep)
	}
	must(s.RestoreInPlace(ctx))
	must(s.Unlock(ctx))
	meanwhile()
	if writer.Filling() {
		bytes, err := writer.Fill(ctx)
		if must(err); bytes == 0 {
			w.t.Error("nothing was filled")
		}
	}
	must(writer.Wait())
	writer.Describe(m)
	must(images.WriteMetadata(dir, m))
	return m
}

// Memory of an interposer that is kept on the GPU while the driver checkpoints: the process runs on with all of it, has
// no more of it when it is copied, and the checkpoint has what was there at the cut, not what came after.
func TestInterposerKept(t *testing.T) {
	if !steer.CanSteer {
		t.Skip("an interposer is for processors whose processes can be steered")
	}
	for name, place := range map[string]func(*testing.T) string{"disk": diskDir, "memory": memoryDir} {
		t.Run(name, func(t *testing.T) {
			w := startWork(t, "12M", "LD_PRELOAD="+softDir+"/"+interposer.LibraryName)
			for range 2 {
				w.ask("write 300")
				want := w.left(place(t), false, func() {})
				to := place(t)
				got := w.left(to, true, func() {
					w.verify()
					w.ask("write 1000")
				})
				w.verify()
				if n := w.imports(); n != 0 {
					t.Errorf("%d pieces of kept memory are mapped", n)
				}
				area := func(m *images.Metadata) images.Area { return m.Processes[0].Areas[0] }
				if len(got.Processes[0].Areas) != 2 || area(got).Bytes != 12<<20 || !slices.Equal(area(got).Digests, area(want).Digests) {
					t.Errorf("kept:   %+v\ncopied: %+v", got.Processes[0].Areas, want.Processes[0].Areas)
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

// smallDir is a directory in memory of so many bytes.
func smallDir(t *testing.T, bytes int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// Others fill the directory between the look for room and the copy: the checkpoint fails and says so, and the program has
// its memory, also if the container was to end.
func TestInterposerKeptNoSpace(t *testing.T) {
	if !steer.CanSteer {
		t.Skip("an interposer is for processors whose processes can be steered")
	}
	w := startWork(t, "12M", "LD_PRELOAD="+softDir+"/"+interposer.LibraryName)
	for _, stays := range []bool{true, false} {
		s, dir := w.lock(), smallDir(t, 64<<20)
		if err := s.Preflight(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "others"), make([]byte, 56<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Save(t.Context(), dir, StaysFrozen); err != nil {
			t.Fatal(err)
		}
		writer, err := s.Store(t.Context(), dir, stays)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := writer.Fill(t.Context()); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("filled: %v", err)
		}
		writer.Close()
		if err := s.RestoreInPlace(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.Unlock(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.verify()
	}
}
