// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/powerdisk"
	"github.com/gpuckpt/gpuckpt/internal/guard/trust"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/operation/journal"
)

// The power is lost at every flush of a checkpoint, with some of what was not flushed on the disk.
// What is then found is the checkpoint, byte for byte, or is refused; and once the client has been
// told that the checkpoint is made, it is there. make soak tries every flush, `make test` some.
func TestPowerLost(t *testing.T) {
	if session.GPU.Kind != harness.SoftwareGPU {
		t.Skip("a real GPU's state is larger than a disk of which each write is remembered")
	}
	for _, test := range []struct {
		name, gpu string
		disk      int64
		settings  string
	}{
		{"memory first", "40M", 128 << 20, ""},
		{"written through", "96M", 256 << 20, "memory_limit = 83886080\nwhen_short = \"write-through\""},
	} {
		t.Run(test.name, func(t *testing.T) {
			results.Add(t)
			if test.settings != "" {
				shared.Configured(t, shared.Staging("power", test.settings))
			}
			t.Setenv(config.Env, shared.ShimConfigPath())
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", test.gpu)
			k.Expect(t, "verify", "bad=0")
			disk, err := powerdisk.Make(harness.DiskDir(t), test.disk)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := disk.Stop(); err != nil {
					t.Error(err)
				}
			})
			dir := filepath.Join(disk.Dir, "images")
			checkpointInto(t, shared, k, dir)
			told := disk.Events()
			k.Expect(t, "verify", "bad=0")
			right := contents(t, dir)
			if err := disk.Stop(); err != nil {
				t.Fatal(err)
			}
			complete, refused := 0, 0
			crashes := disk.Crashes(told)
			for i, crash := range crashes {
				if os.Getenv("GPUCKPT_TEST_SOAK") == "" && i%16 > 0 && i < len(crashes)-4 {
					continue // the end is what matters most
				}
				for lost := range uint64(2) {
					err := disk.At(crash, lost, func(at string) error {
						dir := filepath.Join(at, "images")
						err := accept(t, dir)
						if err != nil {
							refused++
							if i == len(crashes)-1 {
								return fmt.Errorf("the client was told of a checkpoint that is not there: %w", err)
							}
							return nil
						}
						complete++
						for name, data := range contents(t, dir) {
							if !bytes.Equal(data, right[name]) {
								return fmt.Errorf("%s is accepted and wrong", name)
							}
						}
						return nil
					})
					if err != nil {
						t.Errorf("after flush %d of %d, with lost writes %d: %v", i+1, len(crashes), lost, err)
					}
				}
			}
			t.Logf("%d losses of power: %d complete checkpoints, %d refused", complete+refused, complete, refused)
			if refused < 3 || complete == 0 {
				t.Errorf("%d states were refused, and %d complete: the disk did not lose what it should", refused, complete)
			}
		})
	}
}

// The record of a checkpoint without CUDA is flushed beside CRIU. It is on the disk at every loss of power that
// leaves something of a checkpoint which is not complete: the next shim removes it by the record.
func TestPowerLostWithoutCUDA(t *testing.T) {
	results.Add(t)
	disk, err := powerdisk.Make(harness.DiskDir(t), 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := disk.Stop(); err != nil {
			t.Error(err)
		}
	})
	shared.Configured(t, "")
	text, err := os.ReadFile(shared.ShimConfigPath())
	if err == nil {
		err = shared.SetShimConfig(strings.ReplaceAll(string(text), shared.Records(), filepath.Join(disk.Dir, "records")))
	}
	if err != nil {
		t.Fatal(err)
	}
	k := shared.Work(t, harness.RunSpec{}, "plain")
	k.Expect(t, "count", "101")
	checkpointInto(t, shared, k, filepath.Join(disk.Dir, "images"))
	told := disk.Events()
	if err := disk.Stop(); err != nil {
		t.Fatal(err)
	}
	left := 0
	for _, crash := range disk.Crashes(told) {
		for lost := range uint64(2) {
			err := disk.At(crash, lost, func(at string) error {
				dir := filepath.Join(at, "images")
				files, _ := os.ReadDir(dir) // it may not be there yet
				if _, err := images.ReadMetadata(dir); err == nil || len(files) == 0 {
					return nil
				}
				left++
				_, err := journal.Read(journal.Path(filepath.Join(at, "records"), shared.Namespace(), k.ID))
				return err
			})
			if err != nil {
				t.Errorf("after event %d, with lost writes %d: %v", crash, lost, err)
			}
		}
	}
	if left == 0 {
		t.Error("nothing was left: the disk did not lose what it should")
	}
}

// accept does what a restore does before it begins, and reads all GPU state.
func accept(t *testing.T, dir string) error {
	if err := trust.Admit(t.Context(), config.For(nil), dir, nil); err != nil {
		return err
	}
	c, err := images.Open(dir)
	if err != nil {
		return err
	}
	if len(c.Areas()) == 0 {
		return errors.New("it has no GPU state")
	}
	return images.Check(t.Context(), c.Areas(), 0, nil)
}

// contents are the files of a directory, by name.
func contents(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := make(map[string][]byte)
	for _, e := range entries {
		if files[e.Name()], err = os.ReadFile(filepath.Join(dir, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return files
}
