// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/gpulist"
)

func TestRoomOnto(t *testing.T) {
	a, b := cuda.GPU{UUID: "GPU-a", Name: "H", Index: 0, Memory: 100 << 20}, cuda.GPU{UUID: "GPU-b", Name: "H", Index: 1, Memory: 100 << 20}
	silent, none, other := b, b, b
	silent.UUID, none.UUID, other.Name = "GPU-silent", "GPU-none", "T"
	survey := cuda.Survey{Devices: []cuda.Device{
		{GPU: cuda.GPU{UUID: "GPU-a", Memory: 100 << 20, Free: 10 << 20}, Users: []cuda.DeviceUse{{PID: 1 << 30, Bytes: 90 << 20}}},
		{GPU: cuda.GPU{UUID: "GPU-b", Memory: 100 << 20, Free: 60 << 20}},
		{GPU: cuda.GPU{UUID: "GPU-silent"}},
	}}
	both := map[string]uint64{"GPU-a": 50 << 20, "GPU-b": 5 << 20}
	const user = "process 1073741824 has 90MiB"
	for _, test := range []struct {
		name      string
		use       map[string]uint64
		area      uint64
		had, onto []cuda.GPU
		err       string
	}{
		{"no room", both, 0, []cuda.GPU{a}, []cuda.GPU{a}, user},
		{"room on another", both, 0, []cuda.GPU{a}, []cuda.GPU{b}, ""},
		{"swapped", both, 0, []cuda.GPU{a, b}, []cuda.GPU{b, a}, ""},
		{"as they were", both, 0, []cuda.GPU{a, b}, []cuda.GPU{a, b}, user},
		{"NVML told no use", nil, 20 << 20, []cuda.GPU{a}, []cuda.GPU{a}, user},
		{"NVML told no use of several", nil, 20 << 20, []cuda.GPU{a, b}, []cuda.GPU{a, b}, ""},
		{"NVML tells no memory", both, 0, []cuda.GPU{a}, []cuda.GPU{silent}, ""},
		{"NVML does not list it", both, 0, []cuda.GPU{a}, []cuda.GPU{none}, ""},
		{"another model", both, 0, []cuda.GPU{a}, []cuda.GPU{other}, "models"},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := &locked{use: usage{byGPU: test.use}, areas: []Area{{Area: images.Area{Bytes: test.area}}}}
			need, decided := l.requirement(test.had, test.onto, test.had)
			pairs, err := cdi.Pairs(need, gpulist.Surveyed(test.onto, survey), decided)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("error %v, want one that says %q", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for i, p := range pairs {
				if p.Old.UUID != test.had[i].UUID || p.New.UUID != test.onto[i].UUID {
					t.Errorf("%v goes to %v", p.Old, p.New)
				}
			}
		})
	}
}

func TestSuspendedTries(t *testing.T) {
	pair := func(o, n string) cuda.Pair { return cuda.Pair{Old: o, New: n} }
	onto := []cdi.Pair{{Old: cdi.GPU{UUID: "a"}, New: cdi.GPU{UUID: "b"}}, {Old: cdi.GPU{UUID: "b"}, New: cdi.GPU{UUID: "a"}}}
	l := &locked{
		info:  cuda.Info{GPUs: []cuda.GPU{{UUID: "a", Minor: 0}, {UUID: "b", Minor: 1}}},
		procs: cuda.Group{{PID: cuda.PID{NS: 1}, GPUs: []int{0}}, {PID: cuda.PID{NS: 7}, GPUs: []int{0, 1}}},
		use:   usage{byGPU: map[string]uint64{"b": 1}},
	}
	want := map[int][][]cuda.Pair{
		1: {{pair("a", "b"), pair("b", "a")}, {pair("a", "b")}, {pair("b", "b"), pair("a", "a")}, {pair("b", "b")}},
		7: {{pair("a", "b"), pair("b", "a")}, {pair("b", "a")}, {pair("b", "b"), pair("a", "a")}, {pair("a", "a")}},
	}
	if got := l.tries(onto); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A GPU that a container only saw gets a place as well: its own, if that is free.
func TestSeenGPUsArePaired(t *testing.T) {
	gpu := func(n int) cuda.GPU { return cuda.GPU{UUID: "GPU-" + string(rune('a'+n)), Index: n, Minor: n} }
	a, b, c := gpu(0), gpu(1), gpu(2)
	for _, test := range []struct {
		had, onto, seen []cuda.GPU
		want            string
	}{
		{[]cuda.GPU{a}, []cuda.GPU{b}, []cuda.GPU{a}, "[{GPU-a GPU-b}]"},
		{[]cuda.GPU{a}, []cuda.GPU{b}, []cuda.GPU{a, b}, "[{GPU-a GPU-b} {GPU-b GPU-a}]"},
		{[]cuda.GPU{a}, []cuda.GPU{c}, []cuda.GPU{a, b}, "[{GPU-a GPU-c} {GPU-b GPU-b}]"},
		{[]cuda.GPU{a, b}, []cuda.GPU{b, a}, []cuda.GPU{a, b}, "[{GPU-a GPU-b} {GPU-b GPU-a}]"},
	} {
		need, decided := new(locked).requirement(test.had, test.onto, test.seen)
		pairs, err := cdi.Pairs(need, gpulist.Surveyed(slices.Concat(test.onto, gpulist.Without(test.seen, test.onto)), cuda.Survey{}), decided)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(gpulist.Pairs(pairs)); got != test.want {
			t.Errorf("%v to %v: got %s, want %s", test.had, test.onto, got, test.want)
		}
	}
}
