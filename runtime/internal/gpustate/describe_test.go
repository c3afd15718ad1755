// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"slices"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
)

const (
	uuidA = "GPU-ac739775-045d-4094-5e9b-4ca9cf57ebec"
	uuidB = "GPU-50bfc93b-52b4-cb57-7e91-b4095c5b2f72"
)

// A checkpoint names all GPUs that each process could open.
func TestMetadataGPUs(t *testing.T) {
	info := cuda.Info{GPUs: []cuda.GPU{{UUID: uuidA, Minor: 0}, {UUID: uuidB, Minor: 1, Index: 1}, {UUID: "GPU-instance", Minor: -1, Index: 2}}}
	for _, test := range []struct {
		name    string
		request cdi.Request
		proc    cuda.Process
		want    []string
	}{
		{"one of two", cdi.Request{Minors: []int{0, 1}}, cuda.Process{GPUs: []int{1}}, []string{uuidA, uuidB}},
		{"the one granted", cdi.Request{Minors: []int{1}}, cuda.Process{GPUs: []int{1}}, []string{uuidB}},
		{"one past the spec", cdi.Request{Minors: []int{1}}, cuda.Process{GPUs: []int{0}}, []string{uuidA, uuidB}},
		{"the spec tells nothing", cdi.Request{}, cuda.Process{GPUs: []int{0}}, []string{uuidA}},
		{"the host's /dev", cdi.Request{AllNodes: true}, cuda.Process{GPUs: []int{0}}, []string{uuidA, uuidB}},
		{"granted and gone", cdi.Request{Minors: []int{0, 5}}, cuda.Process{GPUs: []int{0}}, []string{uuidA}},
		{"checkpointed by hand", cdi.Request{Minors: []int{0}}, cuda.Process{State: cuda.Checkpointed}, nil},
	} {
		s := &State{opts: Options{Request: test.request}, locked: locked{info: info, procs: []cuda.Process{test.proc}}}
		m, err := s.Describe(time.Now())
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		var all []string
		for _, d := range m.GPUs {
			all = append(all, d.UUID)
		}
		if !slices.Equal(m.Processes[0].GPUs, test.want) || !slices.Equal(all, test.want) {
			t.Errorf("%s: process %v, checkpoint %v; want %v", test.name, m.Processes[0].GPUs, all, test.want)
		}
	}
	s := &State{locked: locked{info: info, procs: []cuda.Process{{GPUs: []int{4}}}}}
	if _, err := s.Describe(time.Now()); err == nil {
		t.Error("a GPU that the driver does not list: no error")
	}
}
