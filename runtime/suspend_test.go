// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"reflect"
	"testing"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/cuda"
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
		{name: "suspend", annotations: map[string]string{SuspendAnnotation: "true"}, want: &suspension{suspend: true}},
		{name: "empty resources", annotations: map[string]string{SuspendAnnotation: "true"}, resources: "{}", want: &suspension{suspend: true}},
		{name: "resources", annotations: map[string]string{SuspendAnnotation: "true"}, resources: `{"cpu":{"shares":2}}`, refused: true},
		{name: "spill", annotations: map[string]string{SuspendAnnotation: "true", SpillAnnotation: "/var/spill/"}, want: &suspension{suspend: true, spill: "/var/spill"}},
		{name: "spill to nowhere", annotations: map[string]string{SuspendAnnotation: "true", SpillAnnotation: ""}, refused: true},
		{name: "relative spill", annotations: map[string]string{SuspendAnnotation: "true", SpillAnnotation: "spill"}, refused: true},
		{name: "spill alone", annotations: map[string]string{SpillAnnotation: "/var/spill"}, refused: true},
		{name: "resume", annotations: map[string]string{SuspendAnnotation: "false"}, want: &suspension{}},
		{name: "resume elsewhere", annotations: map[string]string{SuspendAnnotation: "false", ResumeGPUsAnnotation: "1, GPU-a"}, want: &suspension{gpus: []string{"1", "GPU-a"}}},
		{name: "resume nowhere", annotations: map[string]string{SuspendAnnotation: "false", ResumeGPUsAnnotation: ""}, refused: true},
		{name: "resume and spill", annotations: map[string]string{SuspendAnnotation: "false", SpillAnnotation: "/var/spill"}, refused: true},
		{name: "suspend elsewhere", annotations: map[string]string{SuspendAnnotation: "true", ResumeGPUsAnnotation: "1"}, refused: true},
		{name: "neither", annotations: map[string]string{SuspendAnnotation: "1"}, refused: true},
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
