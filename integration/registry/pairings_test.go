// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A pairing is a way that GPU memory goes there and back.
type pairing struct {
	out   string // how it leaves its process
	store string // where that puts it
	back  string // how a process gets it
	gpu   string // the one that it was on, or another
}

func (p pairing) String() string { return strings.Join([]string{p.out, p.store, p.back, p.gpu}, " ") }

// The dimensions. docs/decisions/0042-mechanisms.md says when which way out is taken.
var (
	outs = []string{
		"driver",  // the driver alone: CRIU dumps its copy
		"steered", // the driver copies into a file
		"window",  // into a file of which little is in memory at a time (write-through)
		"kept",    // an interposer keeps it on the GPU, a mover copies it
		"copier",  // an interposer copies it itself: suspensions, and memory that processes share
	}
	stores = []string{
		"memory", // without a name: a suspension without a spill
		"tmpfs",
		"disk",
	}
	backs = []string{
		"running",  // into the process that it left, which is left running
		"resumed",  // into the same process, after a suspension
		"process",  // into a new one, from a directory
		"image",    // into a new one, from an image that is unpacked
		"arriving", // the same while the image is fetched
	}
	gpusAfter = []string{"same", "other"}
)

// noPairings say why there are none: of each pairing of their words; "" stands for all.
var noPairings = []struct{ outs, stores, backs, gpus, why string }{
	{"", "memory", "running process image arriving", "", "memory without a name is given back to the process that it left alone"},
	{"", "tmpfs disk", "running", "other", "a program that is left running stays on its GPUs"},
	{"", "tmpfs", "resumed", "", "a spill is to free memory, and is refused on a tmpfs"},
	{"driver", "disk", "resumed", "", "what the driver has alone stays in the process: a spill is refused"},
	{"driver", "tmpfs disk", "arriving", "", "CRIU's images are there before a restore begins: nothing of the GPU arrives later"},
	{"window", "memory tmpfs", "", "", "there is a window where a file is on a disk"},
	{"kept", "", "resumed", "", "a suspension is to free the GPU"},
}

func (p pairing) whyNot() string {
	in := func(words, word string) bool { return words == "" || slices.Contains(strings.Fields(words), word) }
	for _, n := range noPairings {
		if in(n.outs, p.out) && in(n.stores, p.store) && in(n.backs, p.back) && in(n.gpus, p.gpu) {
			return n.why
		}
	}
	return ""
}

// pairings are all that there are.
func pairings() (all []pairing) {
	for _, out := range outs {
		for _, store := range stores {
			for _, back := range backs {
				for _, gpu := range gpusAfter {
					if p := (pairing{out, store, back, gpu}); p.whyNot() == "" {
						all = append(all, p)
					}
				}
			}
		}
	}
	return all
}

// envPairings has all pairings walked ("all"), instead of every third.
const envPairings = "GPUCKPT_TEST_PAIRINGS"

// GPU memory goes each way there and back, and the program has it and counts on.
func TestPairings(t *testing.T) {
	c := session.Own(t, harness.Options{})
	specs := t.TempDir()
	if err := c.WriteCDISpec(specs); err != nil {
		t.Fatal(err)
	}
	r := serve(t, false)
	all := pairings()
	t.Logf("there are %d pairings", len(all))
	for i, p := range all {
		if os.Getenv(envPairings) == "all" || i%3 == 0 {
			t.Run(p.String(), func(t *testing.T) { walk(t, c, r, specs, p) })
		}
	}
}

// program is how a program is started whose memory goes a way out, and what the node's file says meanwhile.
func (p pairing) program(c *harness.Containerd) (spec harness.RunSpec, args []string, file string) {
	spec = harness.RunSpec{GPUs: []int{0}, Annotations: map[string]string{}}
	args = []string{"pattern", "--bytes", "24M", "--chunks", "3", "--seed", "7"}
	switch p.out {
	case "driver":
		file = "[staging]\nsteer = false\n"
	case "window":
		args[2] = "128M"
		file = c.Staging("pairings", fmt.Sprintf("memory_limit = %d\nwhen_short = \"write-through\"\n", 64<<20))
	case "kept":
		args[2] = "128M" // of less no mover makes any for a restore
		fallthrough
	case "copier":
		spec.Annotations[annotations.Interposer] = "true"
	}
	switch {
	case p.back == "resumed" && p.gpu == "other": // the two change places
		spec.GPUs = []int{0, 1}
	case p.out == "copier" && p.back != "resumed":
		spec.Ports, args = 2, []string{"ipc", "--share", "large", "--bytes", "24M"}
	}
	return spec, args, file
}

func walk(t *testing.T, c *harness.Containerd, r *server, specs string, p pairing) {
	spec, args, file := p.program(c)
	if file != "" {
		c.Configured(t, file)
	}
	k := c.Work(t, spec, args...)
	k.Expect(t, "count", "101")
	const made = "GPU memory is made for the processes"
	before, windows, fills := "", strings.Count(c.Log(), "written through to the disk"), strings.Count(c.Log(), made)
	if args[0] == "pattern" {
		before = k.Answer(t, "info")
	}
	dir := t.TempDir()
	switch p.store {
	case "tmpfs":
		dir = smallTmpfs(t, "1g")
	case "disk":
		dir = harness.DiskDir(t)
	}

	// What the restored container is given.
	again := []string{"--name", k.ID, "--net-host", "--cdi-spec-dirs", specs, "--snapshotter", c.Snapshotter(), "--gpus", "0"}
	if p.gpu == "other" {
		again[len(again)-1] = "1"
	}
	for name, value := range spec.Annotations {
		again = append(again, "--annotation", name+"="+value)
	}
	ref := r.ref("pairing:" + strings.ReplaceAll(p.String(), " ", "-"))
	switch p.back {
	case "running":
		if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir}); err != nil {
			t.Fatalf("%v\n%s", err, c.LogTail(3000))
		}
		took(t, dir, p)
	case "resumed":
		suspend, resume := []string{"suspend", k.ID}, []string{"resume", k.ID}
		if p.store == "disk" {
			suspend = append(suspend, "--spill", dir)
		}
		if p.gpu == "other" {
			resume = append(resume, "--gpus", "1,0")
		}
		gpuckpt(t, c, suspend...)
		gpuckpt(t, c, resume...)
	case "process":
		if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
			t.Fatalf("%v\n%s", err, c.LogTail(3000))
		}
		took(t, dir, p)
		k.MustRemove(t)
		gpuckpt(t, c, append([]string{"restore", dir, "--base", harness.WorkloadImage}, again...)...)
	case "image":
		gpuckpt(t, c, "checkpoint", k.ID, "--image", ref, "--image-path", dir)
		k.MustRemove(t)
		gpuckpt(t, c, append([]string{"restore", ref}, again...)...)
	case "arriving":
		gpuckpt(t, c, "checkpoint", k.ID, "--push", ref, "--image-path", dir)
		k.MustRemove(t)
		forget(t, c)
		gpuckpt(t, c, append([]string{"restore", ref, "--pull"}, again...)...)
	}
	if p.out == "window" && strings.Count(c.Log(), "written through to the disk") == windows {
		t.Errorf("nothing was written through:\n%s", c.LogTail(3000))
	}
	if p.out == "kept" && p.back != "running" && strings.Count(c.Log(), made) == fills {
		t.Errorf("no mover has made the memory:\n%s", c.LogTail(3000))
	}
	k = adopt(t, c, k.ID, k.Port)
	k.Expect(t, "count", "102")
	if args[0] == "pattern" {
		k.Expect(t, "verify", "bad=0")
		if moved := uuids(before) != uuids(k.Answer(t, "info")); moved != (p.gpu == "other") {
			t.Errorf("the program was on %s and is on %s", before, k.Answer(t, "info"))
		}
	}
	k.MustRemove(t)
}

// uuids are those of the GPUs in a program's answer to "info": pid=1 bytes=… gpus=1 GPU-… 0x….
func uuids(info string) string {
	return strings.Join(slices.DeleteFunc(strings.Fields(info), func(w string) bool { return !strings.HasPrefix(w, "GPU-") }), " ")
}

// took checks by which way GPU memory left.
func took(t *testing.T, dir string, p pairing) {
	t.Helper()
	m, err := images.ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	areas := m.Processes[0].Areas
	interposers := slices.ContainsFunc(areas, func(a images.Area) bool { return a.Interposer })
	drained := slices.ContainsFunc(m.Phases, func(s images.Phase) bool { return s.Name == "drain GPU state" && s.Bytes > 0 })
	found := [3]bool{len(areas) > 0, interposers, drained}
	want := map[string][3]bool{
		"driver": {}, "steered": {true}, "window": {true}, "kept": {true, true, true}, "copier": {true, true},
	}[p.out]
	if found != want {
		t.Errorf("GPU memory has not left as it should: files %v, of an interposer %v, copied beside the driver %v; %s", found[0], found[1], found[2], filepath.Base(dir))
	}
}
