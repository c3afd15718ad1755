// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspension

import (
	"path/filepath"
	"slices"
	"testing"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// A client's annotations are an order that can be obeyed, or are refused.
func FuzzRead(f *testing.F) {
	f.Add("true", "/spill", "")
	f.Add("false", "", "GPU-1, GPU-2")
	f.Add("true", "../..", ",")
	f.Fuzz(func(t *testing.T, suspend, spill, gpus string) {
		r := &taskAPI.UpdateTaskRequest{Annotations: map[string]string{annotations.Suspend: suspend}}
		if spill != "" {
			r.Annotations[annotations.SuspendSpill] = spill
		}
		if gpus != "" {
			r.Annotations[annotations.ResumeGPUs] = gpus
		}
		order, err := Read(r)
		if err != nil {
			return
		}
		if order.Suspend != (suspend == "true") || order.Suspend && order.GPUs != nil || !order.Suspend && order.Spill != "" {
			t.Fatalf("%+v", order)
		}
		if order.Spill != "" && (!filepath.IsAbs(order.Spill) || filepath.Clean(order.Spill) != order.Spill) || slices.Contains(order.GPUs, "") {
			t.Fatalf("%+v", order)
		}
	})
}
