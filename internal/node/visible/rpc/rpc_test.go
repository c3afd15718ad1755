// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package rpc

import (
	"testing"
	"unicode/utf8"

	apievents "github.com/containerd/containerd/api/events"
	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
	"google.golang.org/protobuf/proto"
)

// Each string of a message is made visible, wherever it is in it, and the message itself stays as it was.
func TestMessage(t *testing.T) {
	for b := range 256 {
		bad := "a" + string([]byte{byte(b)}) + "b"
		for _, m := range []proto.Message{
			&taskAPI.StateResponse{ID: bad, Bundle: bad, Stdin: bad, ExecID: bad},
			&taskAPI.CreateTaskRequest{ID: "x", Rootfs: nil, Checkpoint: bad},
			&apievents.ContainerUpdate{ID: bad, Labels: map[string]string{"error": bad, bad: "value"}},
			&apievents.TaskCheckpointed{ContainerID: "x", Checkpoint: bad},
			&taskAPI.PidsResponse{Processes: []*task.ProcessInfo{{Pid: 7}}},
		} {
			before := proto.Clone(m)
			got := Message(m)
			if _, err := proto.Marshal(got); err != nil {
				t.Errorf("%q: %v", bad, err)
			}
			if !isVisible(got.ProtoReflect()) {
				t.Errorf("%q in %T became %v", bad, m, got)
			}
			if !proto.Equal(m, before) && utf8.ValidString(bad) {
				t.Errorf("%q: the message itself has changed", bad)
			}
		}
	}
	if m := (&taskAPI.StateResponse{ID: "x"}); Message(m) != proto.Message(m) || Message(nil) != nil {
		t.Error("a message of visible text is copied")
	}
}
