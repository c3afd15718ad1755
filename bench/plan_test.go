// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/bench/report"
)

func TestParseSize(t *testing.T) {
	for text, want := range map[string]uint64{"16GiB": 16 << 30, "64MiB": 64 << 20, "3KiB": 3 << 10, "1TiB": 1 << 40, "4096": 4096, "0": 0, "16G": 16 << 30, "64mib": 64 << 20, "1.5GiB": 3 << 29} {
		if got, err := parseSize(text); got != want || err != nil {
			t.Errorf("parseSize(%q) is %d, error %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "GiB", "-1GiB", "16X", "99999999TiB"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("parseSize(%q) is %d, want an error", text, got)
		}
	}
}

func TestParse(t *testing.T) {
	cmd, err := parse(strings.Fields("--methods criugpu,ours,ours --sizes 8GiB,16GiB --procs 1,2 --procs-sizes 1GiB --media tmpfs,disk --modes leave --content zero,weights --runs 7 --peer-runs 2 --budget 60 --warm-memory 4GiB"))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(cmd.methods, []string{report.CRIUPlugin, report.Ours}) || !slices.Equal(cmd.sizes, []uint64{8 << 30, 16 << 30}) ||
		!slices.Equal(cmd.procsSizes, []uint64{1 << 30}) || cmd.rounds != 7 || cmd.peerRounds != 2 || cmd.budget != 60 || cmd.warmMemory != 4<<30 {
		t.Errorf("command line read as %+v", cmd)
	}
	plain, err := parse(nil)
	if err != nil {
		t.Fatal(err)
	}
	if plain.peerRounds != plain.rounds || !slices.Equal(plain.procsSizes, plain.sizes) {
		t.Errorf("defaults: %+v", plain)
	}
	if images, err := parse(strings.Fields("--sizes none --images --images-size 48MiB")); err != nil || len(images.sizes) > 0 || len(images.plan()) > 0 || !images.images || images.imagesSize != 48<<20 {
		t.Errorf("images alone: %+v, error %v", images, err)
	}
	for _, line := range []string{"--images-size 0", "--images-size large", "--methods theirs", "--sizes 0", "--sizes 1X", "--procs 0", "--procs 65", "--media floppy", "--modes stay",
		"--content ones", "--runs 0", "--procs-sizes x", "--warm-memory much", "--budget soon"} {
		if _, err := parse(strings.Fields(line)); err == nil {
			t.Errorf("%s was accepted", line)
		}
	}
}

func TestPlan(t *testing.T) {
	s := selection{
		methods: []string{report.Ours, report.CRIUPlugin}, contents: []string{report.ContentPattern}, media: []string{report.OnTmpfs}, modes: []string{report.ModeExit},
		sizes: []uint64{1 << 30, 2 << 30}, procs: []int{1, 4}, procsSizes: []uint64{1 << 30}, gpus: 2, plain: true,
	}
	var got []string
	for _, p := range s.plan() {
		got = append(got, p.Shape.String()+": "+strings.Join(p.methods, " "))
	}
	want := []string{
		"no CUDA, tmpfs, exit: ours", // CRIU's plugin has nothing to do there
		"1 GiB, pattern, tmpfs, exit: ours criugpu",
		"2 GiB, pattern, tmpfs, exit: ours criugpu",
		"4 × 1 GiB on 2 GPUs, pattern, tmpfs, exit: ours criugpu",
	}
	if !slices.Equal(got, want) {
		t.Errorf("plan\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	s.methods = []string{report.CRIUPlugin}
	if p := s.plan(); len(p) != 3 {
		t.Errorf("a case without a method was planned: %v", p)
	}
}

func TestWorkloadArgs(t *testing.T) {
	for _, test := range []struct {
		shape report.Shape
		want  string
	}{
		{report.Shape{Content: report.ContentNone, Procs: 1}, "plain --port 9"},
		{report.Shape{Content: report.ContentNone, Host: 8192, Procs: 1}, "memory --bytes 8192 --port 9"},
		{report.Shape{Content: report.ContentZero, Size: 5, Procs: 1, GPUs: 1}, "pattern --bytes 5 --content zero --seed 7 --port 9"},
		{report.Shape{Content: report.ContentPattern, Size: 5, Procs: 4, GPUs: 2}, "multi --procs 4 --gpus 2 --bytes 5 --content pattern --seed 7 --port 9"},
	} {
		if got := strings.Join((workload{Shape: test.shape, port: 9}).args(), " "); got != test.want {
			t.Errorf("%s: arguments %q, want %q", test.shape, got, test.want)
		}
	}
}
