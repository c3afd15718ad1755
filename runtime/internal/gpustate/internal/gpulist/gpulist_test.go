// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpulist

import (
	"reflect"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
)

func TestGranted(t *testing.T) {
	info := cuda.Info{
		GPUs: []cuda.GPU{
			{UUID: "GPU-b", Minor: 1, Free: 7, VGPU: true}, {UUID: "GPU-a", Minor: 0}, {UUID: "GPU-instance", Minor: -1},
		},
		Partitioned: []cuda.GPU{{UUID: "GPU-m", Minor: 2}},
	}
	for _, test := range []struct {
		request cdi.Request
		want    string
	}{
		{cdi.Request{}, ""},
		{cdi.Request{Minors: []int{0}}, "GPU-a"},
		{cdi.Request{Minors: []int{1, 2, 5}}, "GPU-m(MIG) GPU-b(vGPU)"},
		{cdi.Request{AllNodes: true}, "GPU-m(MIG) GPU-b(vGPU) GPU-a GPU-instance"},
	} {
		var got []string
		for _, g := range Granted(test.request, info) {
			word := g.UUID
			if g.MIG {
				word += "(MIG)"
			}
			if g.VGPU {
				word += "(vGPU)"
			}
			got = append(got, word)
		}
		if text := strings.Join(got, " "); text != test.want {
			t.Errorf("%+v grants %q, want %q", test.request, text, test.want)
		}
	}
}

func TestNamed(t *testing.T) {
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
		got, err := Named(all, test.names)
		if (err != nil) != (test.want == nil) || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%q: got %v, error %v; want %v", test.names, got, err, test.want)
		}
	}
}
