// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspension

import (
	"reflect"
	"testing"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

func TestRead(t *testing.T) {
	for _, test := range []struct {
		name        string
		annotations map[string]string
		resources   string
		want        *Order
		refused     bool
	}{
		{name: "none"},
		{name: "another's", annotations: map[string]string{"example.com/a": "b"}, resources: `{"cpu":{}}`},
		{name: "suspend", annotations: map[string]string{annotations.Suspend: "true"}, want: &Order{Suspend: true}},
		{name: "empty resources", annotations: map[string]string{annotations.Suspend: "true"}, resources: "{}", want: &Order{Suspend: true}},
		{name: "resources", annotations: map[string]string{annotations.Suspend: "true"}, resources: `{"cpu":{"shares":2}}`, refused: true},
		{name: "spill", annotations: map[string]string{annotations.Suspend: "true", annotations.SuspendSpill: "/var/spill/"}, want: &Order{Suspend: true, Spill: "/var/spill"}},
		{name: "spill to nowhere", annotations: map[string]string{annotations.Suspend: "true", annotations.SuspendSpill: ""}, refused: true},
		{name: "relative spill", annotations: map[string]string{annotations.Suspend: "true", annotations.SuspendSpill: "spill"}, refused: true},
		{name: "spill alone", annotations: map[string]string{annotations.SuspendSpill: "/var/spill"}, refused: true},
		{name: "resume", annotations: map[string]string{annotations.Suspend: "false"}, want: &Order{}},
		{name: "resume elsewhere", annotations: map[string]string{annotations.Suspend: "false", annotations.ResumeGPUs: "1, GPU-a"}, want: &Order{GPUs: []string{"1", "GPU-a"}}},
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
			got, err := Read(r)
			if refused := err != nil; refused != test.refused || !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %+v, error %v; want %+v, refused: %v", got, err, test.want, test.refused)
			}
		})
	}
}
