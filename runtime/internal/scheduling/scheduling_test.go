// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package scheduling

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

func TestParse(t *testing.T) {
	all, err := parse(strings.NewReader("1\t0,2-3\t1000000\t16391\t262144\tfalse\n7\t-\t0\t24576\t0\ttrue\n"))
	if err != nil || len(all) != 2 || host.CPUList(all[0].cpus) != "0,2,3" || all[0].slack != 1_000_000 || all[0].io != bestEffortIO|7 || all[1].cpus != nil || all[1].io != idleIO ||
		all[0].is != 0x40000 || all[0].merge || !all[1].merge {
		t.Errorf("%+v, %v", all, err)
	}
	all, err = parse(strings.NewReader("1\t-\t0\t0\t0\tfalse\tbind:0-1\t127\n2\t-\t0\t0\t0\tfalse\tdefault\t0\n"))
	if err != nil || len(all) != 2 || all[0].policy != "bind:0-1" || all[0].core != 127 || all[1].policy != "" {
		t.Errorf("%+v, %v", all, err)
	}
	for _, bad := range []string{
		"x", "1\t-\t0", "1\t-\t0\t0", "1\t0-\t0\t0\t0\tfalse", "1\t3-1\t0\t0\t0\tfalse", "1\t0-65535\t0\t0\t0\tfalse", "1\t\t0\t0\t0\tfalse", "1\t-\t-1\t0\t0\tfalse",
		"1\t-\t99999999999999\t0\t0\tfalse", "1\t-\t0\t8192\t0\tfalse", "1\t-\t0\t-1\t0\tfalse", // an I/O priority of real time
		"1\t-\t0\t0\t4294967295\tfalse", "1\t-\t0\t0\t0\tfalse\tnone\t0", "1\t-\t0\t0\t0\tfalse\tdefault\t4096", "1\t-\t0\t0\t0\tfalse\tdefault",
		strings.Repeat("1", 1<<20),
	} {
		if _, err := parse(strings.NewReader(bad)); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
}

// A policy is written as the kernel shows it, and set as it was.
func TestParsePolicy(t *testing.T) {
	for text, want := range map[string]struct {
		mode uint64
		mask byte
	}{"bind:0-1": {2, 3}, "interleave=static:0,2": {3 | 1<<15, 5}, "prefer_(many)=relative:1": {5 | 1<<14, 2}, "local": {4, 0}} {
		if mode, nodes, err := parsePolicy(text); err != nil || mode != want.mode || nodes[0] != want.mask {
			t.Errorf("%s: %#x, %#x, %v", text, mode, nodes[0], err)
		}
	}
	for _, bad := range []string{"", "none:0", "bind=other:0", "bind:x", "bind:0-99999"} {
		if _, _, err := parsePolicy(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("1\t0,2-3\t1000000\t16391\t262144\tfalse\n7\t-\t0\t24576\t0\ttrue\n")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := parse(strings.NewReader(text))
		if err != nil && !errors.Is(err, images.ErrDamaged) {
			t.Error(err)
		}
		for _, thread := range all {
			if class := thread.io >> ioClass; thread.io != 0 && class != 2 && class != 3 {
				t.Errorf("%q gives the I/O priority %#x", text, thread.io)
			}
		}
	})
}

// What a program has mapped first decides how long the kernel looks for a thread's policy. So there is a bound for
// all threads together, and who has none of it is told.
func TestTimeOfPolicies(t *testing.T) {
	self := func() ([]int, error) { return []int{os.Getpid()}, nil }
	lacks, err := save(t.TempDir(), self, time.Hour)
	if err != nil || len(lacks) > 0 {
		t.Errorf("with time: %q, %v", lacks, err)
	}
	lacks, err = save(t.TempDir(), self, 1) // which the first thread takes
	if err != nil || len(lacks) != 1 || !strings.HasPrefix(lacks[0], "memory policies of ") || strings.Contains(lacks[0], " 0 threads") {
		t.Errorf("without: %q, %v", lacks, err)
	}
}
