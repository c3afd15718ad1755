// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// made are results as a call would make them: ours four times as fast.
func made() *Results {
	r := &Results{
		Commit: "0123abc", GPUKind: harness.RealGPU, Driver: "580.0", GPUs: []harness.ResultGPU{{Name: "One"}},
		MemoryBytes: 128 << 30, PCIe: 50e9, PCIeSource: "50 GB/s", Versions: map[string]string{"criu": "Version: 4.2.1"},
		Calls: []Call{{Date: "2026-11-21", Args: []string{"--runs", "3"}, DiskRate: 2e9, DiskReadRate: 2e9, NotRun: []string{"64 GiB: too large"}}},
	}
	add := func(s Shape, method string, check, restore float64) {
		phases := []images.Phase{{Name: "save GPU state", Took: time.Duration(check * 0.9 * 1e9), Bytes: s.Bytes()}, {Name: "a < b", Start: time.Duration(check * 0.9 * 1e9), Took: time.Duration(check * 0.1 * 1e9)}}
		r.Runs = append(r.Runs, Run{
			Shape: s, Method: method, Verified: true, ImageBytes: s.Bytes(),
			Checkpoint: Operation{Seconds: check, Driver: check * 0.9, Covered: 1, Phases: phases, Down: check * 1.5, Gap: check * 1.4},
			Restore:    Operation{Seconds: restore, Driver: restore * 0.9, Covered: 1, Phases: phases},
		})
	}
	one := Shape{Content: ContentPattern, Size: 16 << 30, Procs: 1, GPUs: 1, Media: OnTmpfs, Mode: ModeExit}
	small, two, disk, plain, leave := one, one, one, one, one
	small.Size = 8 << 30
	two.Procs, two.GPUs = 2, 2
	disk.Media = OnDisk
	plain.Content, plain.Size, plain.GPUs = ContentNone, 0, 0
	leave.Mode = ModeLeave
	for i := range 3 {
		d := float64(i) / 10
		add(small, Ours, 2+d, 1.5+d)
		add(one, Ours, 4+d, 3+d)
		add(one, CRIUPlugin, 4*(4+d), 4*(3+d))
		add(two, Ours, 1.1*(4+d), 1.2*(3+d))
		add(disk, Ours, 2*(4+d), 1.5*(3+d))
		add(plain, Ours, 0.1, 0.1)
		add(plain, Stock, 0.1, 0.2)
		add(leave, Ours, 4+d, 3+d)
	}
	bad := r.Runs[0]
	bad.Verified, bad.Error, bad.Checkpoint.Seconds = false, "bits differ\nmore", 0.001
	r.Runs = append(r.Runs, bad)
	return r
}

// madeImages are checkpoint images as --images makes them: the stock way ten
// times as slow, and of the second checkpoint two layers of 64 new.
func madeImages() ([]ImageRun, []RegistryRun) {
	outcome := func(round int) ImageOutcome { return ImageOutcome{Size: 8 << 30, Round: round, Verified: true} }
	var images []ImageRun
	for i := range 3 {
		d := float64(i) / 10
		images = append(images, ImageRun{ImageOutcome: outcome(i + 1), Method: Ours, Compression: "none", Checkpoint: 2 + d, Restore: 3 + d, Resume: 1 + d, Stored: 8 << 30})
	}
	images = append(images,
		ImageRun{ImageOutcome: outcome(1), Method: Ours, Compression: "zstd", Checkpoint: 4.2, Restore: 3.1, Resume: 1.1, Stored: 8 << 30},
		ImageRun{ImageOutcome: outcome(1), Method: Stock, Checkpoint: 21, Restore: 9.3, Stored: 16 << 30},
		ImageRun{ImageOutcome: ImageOutcome{Size: 8 << 30, Round: 2, Error: "no\nmore"}, Method: Stock, Checkpoint: 0.1})
	return images, []RegistryRun{
		{
			ImageOutcome: outcome(1), LayerBytes: 128 << 20, Pull: 7, Fetched: 8 << 30, Resume: 2, NextPull: 1.5, NextFetched: 256 << 20,
			First: SentImage{Checkpoint: 5, Paused: 3, GPUWritten: 8 << 30, Push: 6, Sent: 8 << 30, PushGPU: 8 << 30},
			Second: SentImage{Checkpoint: 4, Paused: 3.5, GPUWritten: 256 << 20, GPUReused: 8<<30 - 256<<20, Push: 0.5, Sent: 257 << 20,
				PushGPU: 8 << 30, PushGPUReused: 8<<30 - 128<<20},
		},
		{ImageOutcome: ImageOutcome{Size: 8 << 30, Round: 2, Error: "cut off"}, Pull: 0.1},
	}
}

func TestMarkdown(t *testing.T) {
	r := made()
	r.Limit = &LimitResult{Size: 16 << 30, Limit: 2 << 30, Ours: r.Runs[0], Stock: LimitStock{OOM: true, ExitCode: 137, Error: "gone"}}
	pair := ShortRun{Usual: r.Runs[0], Through: r.Runs[0]}
	pair.Usual.Checkpoint.StagingPeak, pair.Through.Checkpoint.StagingPeak = 17<<30, 1<<30
	r.Short = &ShortResult{Size: 16 << 30, Buffer: 1 << 30, Pairs: []ShortRun{pair}}
	r.ImageRuns, r.RegistryRuns = madeImages()
	r.ImageRuns = append(r.ImageRuns, ImageRun{
		ImageOutcome: ImageOutcome{Size: 8 << 30, Media: OnDisk, Verified: true}, Method: Ours, Compression: "none", Checkpoint: 4, Flush: 1, Restore: 9, Resume: 5, Stored: 8 << 30,
	})
	r.ManyRuns = []ManyRun{{
		ImageOutcome: ImageOutcome{Size: 8 << 30, Verified: true}, Count: 4, GPUs: 1, One: 1, OneDriver: 0.5, All: 1.4, AllDriver: 0.8, OneMemory: MemoryPeak{Used: 8 << 30}, AllMemory: MemoryPeak{Used: 17 << 29},
	}}
	text := r.Markdown()
	// Spaces only align.
	squeezed := strings.Join(strings.Fields(text), " ")
	for _, want := range []string{
		"criu 4.2.1",
		"| 16 GiB, pattern, tmpfs, exit | ours | 3 | 4.10 (4.00–4.20) | 1.00× | 3.10 (3.00–3.20) | 1.00× | 16.00 GiB |",
		"| | criugpu | 3 | 16.40 (16.00–16.80) | 4.00× | 12.40 (12.00–12.80) | 4.00× |",
		"| 8 GiB, pattern, tmpfs, exit | ours | 3 |", // the run that failed does not count
		"| 2 × 16 GiB on 2 GPUs, pattern, tmpfs, exit | ours | 4.51 (4.40–4.62) | 1.10× | 3.72 (3.60–3.84) | 1.20× |",
		// 16 GiB at 2 GB/s take 8.59 s, more than the 4.10 s in memory
		"| 16 GiB, pattern, disk, exit | ours | checkpoint | 8.20 (8.00–8.40) | 8.59 s | 0.95× |",
		"| no CUDA, tmpfs, exit | restore | 0.100 (0.100–0.100) | 0.200 (0.200–0.200) | 0.50× |",
		"| 16 GiB, pattern, tmpfs, leave | ours | 6.15 (6.00–6.30) | 3.69 (3.60–3.78) | 5.74 (5.60–5.88) |",
		"| 16 GiB, pattern, tmpfs, exit | checkpoint | 4.10 (4.00–4.20) | 3.69 (3.60–3.78) | 0.410 (0.400–0.420) | 100.0 % |",
		"was killed for its memory (OOM event, exit code 137); the step answered: gone",
		"16 GiB of GPU memory to a disk: usually, and written through a buffer of 1 GiB.",
		"| usual | 1 | 2.00 s | 1.50 s | 17.00 GiB | | written through | 1 | 2.00 s | 1.50 s | 1.00 GiB |",
		"| 8 GiB | gpuckpt, none | 3 | 2.10 (2.00–2.20) | 1.00× | 3.10 (3.00–3.20) | 1.00× | 1.10 (1.00–1.20) | 1.00× | 8.00 GiB |",
		"| 8 GiB | gpuckpt, zstd | 1 | 4.20 | 2.00× | 3.10 | 1.00× | 1.10 | 1.00× | 8.00 GiB |",
		// ctr's restore is beside both of ours
		"| 8 GiB | ctr, CUDA steps by hand | 1 | 21.00 | 10.00× | 9.30 | 3.00× | 9.30 | 8.45× | 16.00 GiB |",
		"writes to 1 % of its GPU memory",
		"| 8 GiB | 128 MiB | first | 1 | 5.00 | 3.00 | 8.00 GiB | 0.0 % | 6.00 | 8.00 GiB | 0.0 % |",
		"| 8 GiB | 128 MiB | second | 1 | 4.00 | 3.50 | 256.0 MiB | 96.9 % | 0.500 | 257.0 MiB | 98.4 % |",
		"| 8 GiB | 1 | 7.00 | 8.00 GiB | 2.00 | 1.50 | 256.0 MiB | 3.1 % |",
		"| 8 GiB | 4 | 1 | 1.00 s | 0.500 s | 1.40 s | 0.800 s | 1.40× | kept | 8.00 GiB | 8.50 GiB |",
		"| 8 GiB, disk | gpuckpt, none | 8.00 GiB | 4.00 s | 5.00 s | 4.29 s | 1.16× | 9.00 s |",
		"- failed: 8 GiB, pattern, tmpfs, exit, ours, round 0: bits differ",
		"- failed: checkpoint image of 8 GiB, ctr, CUDA steps by hand, round 2: no",
		"- failed: checkpoint image of 8 GiB, a registry, round 2: cut off",
		"- not run: 64 GiB: too large",
	} {
		if !strings.Contains(squeezed, want) {
			t.Errorf("the tables lack %q", want)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
}

// Tables of nothing leave no headings behind.
func TestMarkdownEmpty(t *testing.T) {
	if text := (&Results{GPUKind: harness.RealGPU}).Markdown(); strings.Contains(text, "##") {
		t.Errorf("headings without tables:\n%s", text)
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	all := made()
	all.ImageRuns, all.RegistryRuns = madeImages()
	if err := all.Write(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"chart.svg", "timeline.svg"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		for d := xml.NewDecoder(bytes.NewReader(data)); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Errorf("%s: %v", name, err)
				break
			}
		}
		for _, want := range map[string][]string{
			"chart.svg":    {"gpuckpt", "CRIU with its CUDA plugin", "50 GB/s"},
			"timeline.svg": {"checkpoint of 16 GiB", "restore of 16 GiB", "save GPU state", "a &lt; b", "16GiB"},
		}[name] {
			if !bytes.Contains(data, []byte(want)) {
				t.Errorf("%s lacks %q", name, want)
			}
		}
	}
	// What was written can be read and merged with itself: twice the runs.
	path := filepath.Join(dir, "results.json")
	r, err := Read([]string{path, path})
	if err != nil {
		t.Fatal(err)
	}
	if want := 2 * len(all.Runs); len(r.Runs) != want || len(r.Calls) != 2 {
		t.Errorf("%d runs of %d calls, want %d of 2", len(r.Runs), len(r.Calls), want)
	}
	if !slices.Equal(r.ImageRuns, append(all.ImageRuns, all.ImageRuns...)) || !reflect.DeepEqual(r.RegistryRuns, append(all.RegistryRuns, all.RegistryRuns...)) {
		t.Errorf("images read as %+v and %+v", r.ImageRuns, r.RegistryRuns)
	}
}

// The exit status is about runs of ours, of every kind.
func TestFirstFailed(t *testing.T) {
	images, transfers := madeImages()
	for want, r := range map[string]*Results{
		"":                            {ImageRuns: images, RegistryRuns: transfers[:1]}, // ctr's run failed, none of ours
		"8 GiB, pattern, tmpfs, exit": made(),
		"checkpoint image of 8 GiB, gpuckpt, none, round 3": {ImageRuns: []ImageRun{images[0], {ImageOutcome: ImageOutcome{Size: 8 << 30, Round: 3}, Method: Ours, Compression: "none"}}},
		"checkpoint image of 8 GiB, a registry, round 2":    {RegistryRuns: transfers},
	} {
		if got := r.FirstFailed(); got != want {
			t.Errorf("the run that failed is %q, want %q", got, want)
		}
	}
}

// Nothing measured is nothing drawn, and no error.
func TestWriteEmpty(t *testing.T) {
	dir := t.TempDir()
	if err := (&Results{}).Write(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"chart.svg", "timeline.svg"} {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMergeRefused(t *testing.T) {
	for name, change := range map[string]func(*Results){
		"commit": func(r *Results) { r.Commit = "other" },
		"driver": func(r *Results) { r.Driver = "590.0" },
		"model":  func(r *Results) { r.GPUs = []harness.ResultGPU{{Name: "Two"}} },
	} {
		dir := t.TempDir()
		var paths []string
		for i, r := range []*Results{made(), made()} {
			if i == 1 {
				change(r)
			}
			data, err := json.Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			paths = append(paths, filepath.Join(dir, name+string(rune('a'+i))))
			if err := os.WriteFile(paths[i], data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := Read(paths); err == nil {
			t.Errorf("results of another %s were merged", name)
		}
	}
}
