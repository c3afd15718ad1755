// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

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

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// made are results as a call would make them: ours four times as fast.
func made() *results {
	r := &results{
		Commit: "0123abc", GPUKind: harness.RealGPU, Driver: "580.0", GPUs: []harness.ResultGPU{{Name: "One"}},
		MemoryBytes: 128 << 30, PCIe: 50e9, PCIeSource: "50 GB/s", Versions: map[string]string{"criu": "Version: 4.2.1"},
		Calls: []call{{Date: "2026-11-21", Args: []string{"--runs", "3"}, DiskRate: 2e9, DiskReadRate: 2e9, NotRun: []string{"64 GiB: too large"}}},
	}
	add := func(s shape, method string, check, restore float64) {
		phases := []images.Phase{{Name: "save GPU state", Took: time.Duration(check * 0.9 * 1e9), Bytes: s.bytes()}, {Name: "a < b", Start: time.Duration(check * 0.9 * 1e9), Took: time.Duration(check * 0.1 * 1e9)}}
		r.Runs = append(r.Runs, run{
			shape: s, Method: method, Verified: true, ImageBytes: s.bytes(),
			Checkpoint: operation{Seconds: check, Driver: check * 0.9, Covered: 1, Phases: phases, Down: check * 1.5, Gap: check * 1.4},
			Restore:    operation{Seconds: restore, Driver: restore * 0.9, Covered: 1, Phases: phases},
		})
	}
	one := shape{Content: contentPattern, Size: 16 << 30, Procs: 1, GPUs: 1, Media: onTmpfs, Mode: modeExit}
	small, two, disk, plain, leave := one, one, one, one, one
	small.Size = 8 << 30
	two.Procs, two.GPUs = 2, 2
	disk.Media = onDisk
	plain.Content, plain.Size, plain.GPUs = contentNone, 0, 0
	leave.Mode = modeLeave
	for i := range 3 {
		d := float64(i) / 10
		add(small, ours, 2+d, 1.5+d)
		add(one, ours, 4+d, 3+d)
		add(one, criugpu, 4*(4+d), 4*(3+d))
		add(two, ours, 1.1*(4+d), 1.2*(3+d))
		add(disk, ours, 2*(4+d), 1.5*(3+d))
		add(plain, ours, 0.1, 0.1)
		add(plain, stock, 0.1, 0.2)
		add(leave, ours, 4+d, 3+d)
	}
	bad := r.Runs[0]
	bad.Verified, bad.Error, bad.Checkpoint.Seconds = false, "bits differ\nmore", 0.001
	r.Runs = append(r.Runs, bad)
	return r
}

// madeImages are checkpoint images as --images makes them: the stock way ten
// times as slow, and of the second checkpoint two layers of 64 new.
func madeImages() ([]imageRun, []registryRun) {
	outcome := func(round int) imageOutcome { return imageOutcome{Size: 8 << 30, Round: round, Verified: true} }
	var images []imageRun
	for i := range 3 {
		d := float64(i) / 10
		images = append(images, imageRun{imageOutcome: outcome(i + 1), Method: ours, Compression: "none", Checkpoint: 2 + d, Restore: 3 + d, Resume: 1 + d, Stored: 8 << 30})
	}
	images = append(images,
		imageRun{imageOutcome: outcome(1), Method: ours, Compression: "zstd", Checkpoint: 4.2, Restore: 3.1, Resume: 1.1, Stored: 8 << 30},
		imageRun{imageOutcome: outcome(1), Method: stock, Checkpoint: 21, Restore: 9.3, Stored: 16 << 30},
		imageRun{imageOutcome: imageOutcome{Size: 8 << 30, Round: 2, Error: "no\nmore"}, Method: stock, Checkpoint: 0.1})
	return images, []registryRun{
		{
			imageOutcome: outcome(1), LayerBytes: 128 << 20, Pull: 7, Fetched: 8 << 30, Resume: 2, NextPull: 1.5, NextFetched: 256 << 20,
			First: sentImage{Checkpoint: 5, Paused: 3, GPUWritten: 8 << 30, Push: 6, Sent: 8 << 30, PushGPU: 8 << 30},
			Second: sentImage{Checkpoint: 4, Paused: 3.5, GPUWritten: 256 << 20, GPUReused: 8<<30 - 256<<20, Push: 0.5, Sent: 257 << 20,
				PushGPU: 8 << 30, PushGPUReused: 8<<30 - 128<<20},
		},
		{imageOutcome: imageOutcome{Size: 8 << 30, Round: 2, Error: "cut off"}, Pull: 0.1},
	}
}

func TestMarkdown(t *testing.T) {
	r := made()
	r.Limit = &limitResult{Size: 16 << 30, Limit: 2 << 30, Ours: r.Runs[0], Stock: limitStock{OOM: true, ExitCode: 137, Error: "gone"}}
	pair := shortRun{Usual: r.Runs[0], Through: r.Runs[0]}
	pair.Usual.Checkpoint.StagingPeak, pair.Through.Checkpoint.StagingPeak = 17<<30, 1<<30
	r.Short = &shortResult{Size: 16 << 30, Buffer: 1 << 30, Pairs: []shortRun{pair}}
	r.ImageRuns, r.RegistryRuns = madeImages()
	r.ImageRuns = append(r.ImageRuns, imageRun{
		imageOutcome: imageOutcome{Size: 8 << 30, Media: onDisk, Verified: true}, Method: ours, Compression: "none", Checkpoint: 4, Flush: 1, Restore: 9, Resume: 5, Stored: 8 << 30,
	})
	r.ManyRuns = []manyRun{{
		imageOutcome: imageOutcome{Size: 8 << 30, Verified: true}, Count: 4, GPUs: 1, One: 1, All: 1.4, OneMemory: memoryPeak{Used: 8 << 30}, AllMemory: memoryPeak{Used: 17 << 29},
	}}
	text := r.markdown()
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
		"| 8 GiB | 4 | 1 | 1.00 s | 1.40 s | 1.40× | kept | 8.00 GiB | 8.50 GiB |",
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
	if text := (&results{GPUKind: harness.RealGPU}).markdown(); strings.Contains(text, "##") {
		t.Errorf("headings without tables:\n%s", text)
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	all := made()
	all.ImageRuns, all.RegistryRuns = madeImages()
	if err := all.write(dir); err != nil {
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
	r, err := readResults([]string{path, path})
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
	for want, r := range map[string]*results{
		"":                            {ImageRuns: images, RegistryRuns: transfers[:1]}, // ctr's run failed, none of ours
		"8 GiB, pattern, tmpfs, exit": made(),
		"checkpoint image of 8 GiB, gpuckpt, none, round 3": {ImageRuns: []imageRun{images[0], {imageOutcome: imageOutcome{Size: 8 << 30, Round: 3}, Method: ours, Compression: "none"}}},
		"checkpoint image of 8 GiB, a registry, round 2":    {RegistryRuns: transfers},
	} {
		if got := r.firstFailed(); got != want {
			t.Errorf("the run that failed is %q, want %q", got, want)
		}
	}
}

// Nothing measured is nothing drawn, and no error.
func TestWriteEmpty(t *testing.T) {
	dir := t.TempDir()
	if err := (&results{}).write(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"chart.svg", "timeline.svg"} {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMergeRefused(t *testing.T) {
	for name, change := range map[string]func(*results){
		"commit": func(r *results) { r.Commit = "other" },
		"driver": func(r *results) { r.Driver = "590.0" },
		"model":  func(r *results) { r.GPUs = []harness.ResultGPU{{Name: "Two"}} },
	} {
		dir := t.TempDir()
		var paths []string
		for i, r := range []*results{made(), made()} {
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
		if _, err := readResults(paths); err == nil {
			t.Errorf("results of another %s were merged", name)
		}
	}
}

func TestExpected(t *testing.T) {
	b := &bench{runs: []run{
		{shape: shape{Size: 8, Procs: 1}, Method: criugpu, Whole: 10},
		{shape: shape{Size: 64, Procs: 1}, Method: criugpu, Whole: 90},
		{shape: shape{Size: 8, Procs: 1}, Method: ours, Whole: 3, Error: "no"},
		{shape: shape{Size: 16 << 20, Procs: 1}, Method: ours, Whole: 3},
	}}
	for _, test := range []struct {
		method string
		size   uint64
		want   time.Duration
	}{{criugpu, 16, 20 * time.Second}, {criugpu, 64, 90 * time.Second}, {criugpu, 4, 2 * time.Second}, {ours, 16, 2 * time.Second}, {ours, 16 << 30, 14 * time.Second}, {stock, 16 << 30, 34 * time.Second}} {
		if got := b.expected(shape{Size: test.size, Procs: 1}, test.method).Round(time.Millisecond); got != test.want {
			t.Errorf("%s of %d is expected to take %v, want %v", test.method, test.size, got, test.want)
		}
	}
}

func TestParseMemory(t *testing.T) {
	m, err := parseMemory("MemTotal:       24684256 kB\nMemFree:  1 kB\nMemAvailable:   20 kB\nShmem:    3 kB\nHugePages_Total:       0\n")
	if want := (hostMemory{total: 24684256 << 10, available: 20 << 10, shmem: 3 << 10}); m != want || err != nil {
		t.Errorf("%+v, error %v, want %+v", m, err, want)
	}
	if _, err := parseMemory("MemTotal: 1 kB\n"); err == nil {
		t.Error("a text without the lines was accepted")
	}
}

func TestCgroupPath(t *testing.T) {
	const v1 = "7:memory:/a/b\n5:cpu,cpuacct:/c\n0::/\n"
	for _, test := range []struct {
		text, controller, want string
		ok                     bool
	}{{v1, "memory", "/a/b", true}, {v1, "cpuacct", "/c", true}, {v1, "pids", "", false}, {"0::/x\n", "", "/x", true}} {
		if got, ok := cgroupPath(test.text, test.controller); got != test.want || ok != test.ok {
			t.Errorf("the cgroup of %q in %q is %q, %t, want %q", test.controller, test.text, got, ok, test.want)
		}
	}
}

// What is removed while files are walked through does not count, but the directory itself does.
func TestWalkFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b", "c/d", "e"} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(name), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	seen := 0
	err := walkFiles(dir, func(path string, _ *unix.Stat_t) error {
		if seen++; seen == 1 { // after the directory was listed
			return errors.Join(os.RemoveAll(filepath.Join(dir, "c")), os.Remove(filepath.Join(dir, "b")))
		}
		return nil
	})
	if err != nil || seen != 2 {
		t.Errorf("%d files were seen, %v; want 2", seen, err)
	}
	if err := walkFiles(filepath.Join(dir, "c"), nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of a directory that is not there: %v", err)
	}
}

func TestImageBytes(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "image"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(1<<30), f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
	if got, err := imageBytes(dir); got < 1<<20 || got > 2<<20 || err != nil {
		t.Errorf("%d bytes, error %v, want one MiB: the hole takes no space", got, err)
	}
}

// The sampler sees memory that is taken and given back in between.
func TestSampler(t *testing.T) {
	const bytes = 64 << 20
	s, err := startSampler()
	if err != nil {
		t.Fatal(err)
	}
	dir, remove, err := mountTmpfs(t.TempDir())
	if err != nil {
		t.Skip("a mount needs root: ", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, bytes), 0o600); err != nil {
		t.Error(err)
	}
	time.Sleep(3 * sampleEvery)
	if err := remove(); err != nil {
		t.Error(err)
	}
	if peak, err := s.stop(); peak.Shmem < bytes/2 || err != nil {
		t.Errorf("peak %+v, error %v, want some %d bytes of shared memory", peak, err, bytes)
	}
}

func TestWarmMemory(t *testing.T) {
	if err := warmMemory(3*warmPiece/2 + 4096); err != nil {
		t.Error(err)
	}
}
