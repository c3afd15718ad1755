// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// signing is the section of a shim's configuration with a key of that name.
func signing(c *harness.Containerd, name string) string {
	return fmt.Sprintf("[signing]\nkey = %q\n", filepath.Join(c.Dir(), name))
}

// A node restores what it has signed. Whatever is not what was signed is refused when the
// container is created, with GPU state and without: every file of the checkpoint with a byte
// changed, a file gone or added, another checkpoint's signature, a key that does not count.
func TestSignature(t *testing.T) {
	results.Add(t)
	for _, workload := range []string{"counter", "plain"} {
		t.Run(workload, func(t *testing.T) {
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, workload)
			k.Expect(t, "count", "101")
			other := t.TempDir() // another checkpoint, with the same key
			checkpointInto(t, shared, k, other)
			dir := t.TempDir()
			k.Expect(t, "count", "102")
			checkpointInto(t, shared, k, dir)
			endTask(t, shared, k)

			refused := func(t *testing.T, words ...string) {
				t.Helper()
				err := restoreTask(t, shared, k, dir)
				harness.Says(t, err, words...)
				if !errdefs.IsFailedPrecondition(err) {
					t.Errorf("the error is no failed precondition: %v", err)
				}
				nothingLeft(t, shared, k)
			}
			swapped := func(t *testing.T, name string, data []byte) {
				t.Helper()
				path := filepath.Join(dir, name)
				was, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { write(t, path, string(was), 0o600) })
				if data == nil {
					err = os.Remove(path)
				} else {
					err = os.WriteFile(path, data, 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			signature := ""
			for _, e := range entries {
				if strings.HasSuffix(e.Name(), ".sig") {
					signature = e.Name()
				}
				if images.IsAreaFile(e.Name()) {
					continue // compared before the program runs: TestDamagedState
				}
				t.Run(e.Name(), func(t *testing.T) {
					data, err := os.ReadFile(filepath.Join(dir, e.Name()))
					if err != nil {
						t.Fatal(err)
					}
					data = slices.Clone(data)
					if len(data) == 0 {
						data = []byte{0}
					} else {
						data[len(data)/2] ^= 1
					}
					swapped(t, e.Name(), data)
					switch e.Name() {
					case sign.ManifestName, signature:
						refused(t, "no trusted key has signed the checkpoint", signature)
					default:
						refused(t, "it is not what was signed", e.Name())
					}
				})
			}
			if signature == "" || len(entries) < 10 {
				t.Fatalf("the dump has %v", entries)
			}
			t.Run("a file gone", func(t *testing.T) {
				swapped(t, "inventory.img", nil)
				refused(t, "it is not what was signed", "inventory.img is missing")
			})
			t.Run("a file too many", func(t *testing.T) {
				path := filepath.Join(dir, "apparmor.img")
				write(t, path, "", 0o600)
				t.Cleanup(func() { os.Remove(path) })
				refused(t, "it is not what was signed", "apparmor.img is not in")
			})
			t.Run("no signature", func(t *testing.T) {
				swapped(t, signature, nil)
				refused(t, "the checkpoint is not signed", "gpuckpt image sign")
			})
			t.Run("no manifest", func(t *testing.T) {
				swapped(t, sign.ManifestName, nil)
				refused(t, "the checkpoint is not signed")
			})
			theirs := func(name string) []byte {
				data, err := os.ReadFile(filepath.Join(other, name))
				if err != nil {
					t.Fatal(err)
				}
				return data
			}
			t.Run("another checkpoint's signature", func(t *testing.T) {
				swapped(t, signature, theirs(signature))
				refused(t, "no trusted key has signed the checkpoint")
			})
			t.Run("another checkpoint's manifest and signature", func(t *testing.T) {
				swapped(t, signature, theirs(signature))
				swapped(t, sign.ManifestName, theirs(sign.ManifestName))
				refused(t, "it is not what was signed")
			})
			t.Run("another node", func(t *testing.T) {
				shared.Configured(t, signing(shared, "another.key"))
				refused(t, "no key is trusted here", "[restore] keys")
				shared.Configured(t, "[restore]\npolicy = \"never\"\n"+signing(shared, "another.key"))
				refused(t, "no key is trusted here")
			})
			// A key that was replaced counts as long as its public half is kept.
			s, err := sign.ReadSigner(shared.SigningKey())
			if err != nil {
				t.Fatal(err)
			}
			keys := t.TempDir()
			write(t, filepath.Join(keys, "old.pub"), string(s.Key.PEM()), 0o644)
			shared.Configured(t, fmt.Sprintf("[restore]\nkeys = [%q]\n", keys)+signing(shared, "new.key"))
			if err := restoreTask(t, shared, k, dir); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			k.Expect(t, "count", "103")
		})
	}
}

// The memory of processes is compared beside CRIU's restore: a byte changed, where CRIU restores it
// and where the shim does, is found before the program runs, with GPU state and without.
func TestSignedMemory(t *testing.T) {
	results.Add(t)
	for _, workload := range []string{"gpumemory", "memory"} {
		t.Run(workload, func(t *testing.T) {
			var spec harness.RunSpec
			if workload == "gpumemory" {
				spec.GPUs = []int{0}
			}
			k := shared.Work(t, spec, workload, "--bytes", "256M")
			k.Expect(t, "verify", "bad=0,0") // it has its memory
			dir := t.TempDir()
			checkpointInto(t, shared, k, dir)
			endTask(t, shared, k)
			f, err := os.OpenFile(largestPages(t, dir), os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			size, err := f.Seek(0, io.SeekEnd)
			if err != nil || size <= images.BlockBytes {
				t.Fatalf("%s has %d bytes: %v", f.Name(), size, err)
			}
			for _, at := range []int64{5, size / 2, size - 5} {
				var b [1]byte
				if _, err := f.ReadAt(b[:], at); err != nil {
					t.Fatal(err)
				}
				if _, err := f.WriteAt([]byte{b[0] ^ 1}, at); err != nil {
					t.Fatal(err)
				}
				err := restoreTask(t, shared, k, dir)
				harness.Says(t, err, "it is not what was signed", filepath.Base(f.Name())+" has other bytes")
				if !errdefs.IsFailedPrecondition(err) {
					t.Errorf("the error is no failed precondition: %v", err)
				}
				nothingRuns(t, shared, k)
				ctr(t, shared, "tasks", "delete", k.ID) // there is no process to kill: none has run
				if _, err := f.WriteAt(b[:], at); err != nil {
					t.Fatal(err)
				}
			}
			if err := restoreTask(t, shared, k, dir); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			k.Expect(t, "verify", "bad=0,0")
		})
	}
}

// largestPages returns the image that has most of the memory.
func largestPages(t *testing.T, dir string) (path string) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "pages-*.img"))
	if err != nil {
		t.Fatal(err)
	}
	largest := int64(-1)
	for _, f := range found {
		st, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() > largest {
			path, largest = f, st.Size()
		}
	}
	return path
}

// What nobody signed is restored where the policy says so, and where it was signed by hand.
// A checkpoint is refused, and the container runs on, if the node's key is not to be had.
func TestUnsigned(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	dir := t.TempDir()

	undo := shared.Configured(t, signing(shared, "dir/signing.key"))
	write(t, filepath.Join(shared.Dir(), "dir"), "in the way", 0o600)
	err := checkpointTask(t, shared, k, dir)
	harness.Says(t, err, "the key that signs this node's checkpoints", "[signing] key")
	k.Expect(t, "count", "102")
	undo()

	undo = shared.Configured(t, "[signing]\nkey = \"\"\n")
	checkpointInto(t, shared, k, dir)
	undo()
	endTask(t, shared, k)
	harness.Says(t, restoreTask(t, shared, k, dir), "the checkpoint is not signed", dir)
	nothingLeft(t, shared, k)
	undo = shared.Configured(t, harness.AnyCheckpoint)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "count", "103")
	undo()
	endTask(t, shared, k)
	var answer struct{ Source string }

	if err := shared.Gpuckpt(t.Context(), &answer, "image", "sign", "dir:"+dir); err != nil {
		t.Fatal(err)
	}
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "count", "103")
}
