// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/steer"
)

func TestSuspensionOf(t *testing.T) {
	for _, test := range []struct {
		name        string
		annotations map[string]string
		resources   string
		want        *suspension
		refused     bool
	}{
		{name: "none"},
		{name: "another's", annotations: map[string]string{"example.com/a": "b"}, resources: `{"cpu":{}}`},
		{name: "suspend", annotations: map[string]string{annotations.Suspend: "true"}, want: &suspension{suspend: true}},
		{name: "empty resources", annotations: map[string]string{annotations.Suspend: "true"}, resources: "{}", want: &suspension{suspend: true}},
		{name: "resources", annotations: map[string]string{annotations.Suspend: "true"}, resources: `{"cpu":{"shares":2}}`, refused: true},
		{name: "spill", annotations: map[string]string{annotations.Suspend: "true", annotations.SuspendSpill: "/var/spill/"}, want: &suspension{suspend: true, spill: "/var/spill"}},
		{name: "spill to nowhere", annotations: map[string]string{annotations.Suspend: "true", annotations.SuspendSpill: ""}, refused: true},
		{name: "relative spill", annotations: map[string]string{annotations.Suspend: "true", annotations.SuspendSpill: "spill"}, refused: true},
		{name: "spill alone", annotations: map[string]string{annotations.SuspendSpill: "/var/spill"}, refused: true},
		{name: "resume", annotations: map[string]string{annotations.Suspend: "false"}, want: &suspension{}},
		{name: "resume elsewhere", annotations: map[string]string{annotations.Suspend: "false", annotations.ResumeGPUs: "1, GPU-a"}, want: &suspension{gpus: []string{"1", "GPU-a"}}},
		{name: "resume nowhere", annotations: map[string]string{annotations.Suspend: "false", annotations.ResumeGPUs: ""}, refused: true},
		{name: "resume and spill", annotations: map[string]string{annotations.Suspend: "false", annotations.SuspendSpill: "/var/spill"}, refused: true},
		{name: "suspend elsewhere", annotations: map[string]string{annotations.Suspend: "true", annotations.ResumeGPUs: "1"}, refused: true},
		{name: "neither", annotations: map[string]string{annotations.Suspend: "1"}, refused: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := &taskAPI.UpdateTaskRequest{Annotations: test.annotations}
			if test.resources != "" {
				r.Resources = &anypb.Any{Value: []byte(test.resources)}
			}
			got, err := suspensionOf(r)
			if refused := err != nil; refused != test.refused || !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %+v, error %v; want %+v, refused: %v", got, err, test.want, test.refused)
			}
		})
	}
}

func TestNamedGPUs(t *testing.T) {
	all := []cuda.GPU{{UUID: "GPU-a", Index: 0}, {UUID: "GPU-b", Index: 1}}
	for _, test := range []struct {
		names []string
		want  []cuda.GPU // nil: refused
	}{
		{[]string{"1"}, all[1:]},
		{[]string{"GPU-b", "0"}, []cuda.GPU{all[1], all[0]}},
		{[]string{"GPU-a", "0"}, nil},
		{[]string{"2"}, nil},
		{[]string{"GPU"}, nil},
	} {
		got, err := namedGPUs(all, test.names)
		if (err != nil) != (test.want == nil) || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%q: got %v, error %v; want %v", test.names, got, err, test.want)
		}
	}
}

func TestFits(t *testing.T) {
	a, b := cuda.GPU{UUID: "GPU-a", Index: 0}, cuda.GPU{UUID: "GPU-b", Index: 1}
	survey := cuda.Survey{Devices: []cuda.Device{
		{UUID: "GPU-a", Memory: 100 << 20, Free: 10 << 20, Users: []cuda.DeviceUse{{PID: 1 << 30, Bytes: 90 << 20}}},
		{UUID: "GPU-b", Memory: 100 << 20, Free: 60 << 20},
		{UUID: "GPU-silent"},
	}}
	both := map[string]uint64{"GPU-a": 50 << 20, "GPU-b": 5 << 20}
	for _, test := range []struct {
		name      string
		use       map[string]uint64
		area      uint64
		had, onto []cuda.GPU
		fits      bool
	}{
		{"no room", both, 0, []cuda.GPU{a}, []cuda.GPU{a}, false},
		{"room on another", both, 0, []cuda.GPU{a}, []cuda.GPU{b}, true},
		{"swapped", both, 0, []cuda.GPU{a, b}, []cuda.GPU{b, a}, true},
		{"as they were", both, 0, []cuda.GPU{a, b}, []cuda.GPU{a, b}, false},
		{"NVML told no use", nil, 20 << 20, []cuda.GPU{a}, []cuda.GPU{a}, false},
		{"NVML told no use of several", nil, 20 << 20, []cuda.GPU{a, b}, []cuda.GPU{a, b}, true},
		{"NVML tells no memory", both, 0, []cuda.GPU{a}, []cuda.GPU{{UUID: "GPU-silent"}}, true},
		{"NVML does not list it", both, 0, []cuda.GPU{a}, []cuda.GPU{{UUID: "GPU-none"}}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			g := &gpuState{use: test.use, areas: []savedArea{{Area: steer.Area{Bytes: test.area}}}}
			err := g.fits(survey, test.had, test.onto)
			if (err == nil) != test.fits {
				t.Fatalf("error %v; want it to fit: %v", err, test.fits)
			}
			if err != nil && !strings.Contains(err.Error(), "process "+strconv.Itoa(1<<30)+" has 90MiB") {
				t.Errorf("it does not say who has the memory: %v", err)
			}
		})
	}
}

func TestSuspendedTries(t *testing.T) {
	pair := func(o, n string) cuda.Pair { return cuda.Pair{Old: o, New: n} }
	g := &gpuState{
		info:  cuda.Info{GPUs: []cuda.GPU{{UUID: "a", Minor: 0}, {UUID: "b", Minor: 1}}},
		procs: []cuda.Process{{PID: cuda.PID{NS: 1}, GPUs: []int{0}}, {PID: cuda.PID{NS: 7}, GPUs: []int{0, 1}}},
		use:   map[string]uint64{"b": 1},
		pairs: []cuda.Pair{pair("a", "b"), pair("b", "a")},
	}
	want := map[int][][]cuda.Pair{
		1: {{pair("a", "b"), pair("b", "a")}, {pair("a", "b")}, {pair("b", "b"), pair("a", "a")}, {pair("b", "b")}},
		7: {{pair("a", "b"), pair("b", "a")}, {pair("b", "a")}, {pair("b", "b"), pair("a", "a")}, {pair("a", "a")}},
	}
	if got := g.gpuTries(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// What a container only saw gets a place as well.
func TestPairAll(t *testing.T) {
	a, b, c := cuda.GPU{UUID: "a"}, cuda.GPU{UUID: "b"}, cuda.GPU{UUID: "c"}
	for _, test := range []struct {
		had, onto, seen []cuda.GPU
		want            string
	}{
		{[]cuda.GPU{a}, []cuda.GPU{b}, []cuda.GPU{a}, "[{a b}]"},
		{[]cuda.GPU{a}, []cuda.GPU{b}, []cuda.GPU{a, b}, "[{a b} {b a}]"},
		{[]cuda.GPU{a}, []cuda.GPU{c}, []cuda.GPU{a, b}, "[{a c} {b a}]"},
		{[]cuda.GPU{a, b}, []cuda.GPU{b, a}, []cuda.GPU{a, b}, "[{a b} {b a}]"},
	} {
		if got := fmt.Sprint(pairAll(test.had, test.onto, test.seen)); got != test.want {
			t.Errorf("%v to %v: got %s, want %s", test.had, test.onto, got, test.want)
		}
	}
}
