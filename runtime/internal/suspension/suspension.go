// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package suspension reads what a client asks for by the annotations of a Task Update: to suspend a
// container, or to resume it.
package suspension

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// Order is what a Task Update asks for.
type Order struct {
	Suspend bool     // else resume
	Spill   string   // a directory; "" for none
	GPUs    []string // to resume on; nil for the same
}

// Read reads an Update. It returns nil for one that is runc's.
func Read(r *taskAPI.UpdateTaskRequest) (*Order, error) {
	var s Order
	want, asked := r.Annotations[annotations.Suspend]
	spill, spills := r.Annotations[annotations.SuspendSpill]
	gpus, moves := r.Annotations[annotations.ResumeGPUs]
	switch {
	case !asked && !spills && !moves:
		return nil, nil
	case !slices.Contains([]string{"", "{}"}, string(r.Resources.GetValue())):
		return nil, fmt.Errorf("an update with annotation %s changes no resources: send two updates: %w", annotations.Suspend, errdefs.ErrInvalidArgument)
	case want == "true" && !moves:
		s.Suspend = true
	case want == "false" && !spills:
	default:
		return nil, fmt.Errorf("annotation %s is %q; it must be \"true\", which %s may go with, or \"false\", which %s may: %w",
			annotations.Suspend, want, annotations.SuspendSpill, annotations.ResumeGPUs, errdefs.ErrInvalidArgument)
	}
	if spills {
		if !filepath.IsAbs(spill) {
			return nil, fmt.Errorf("annotation %s is %q; it must be an absolute path: %w", annotations.SuspendSpill, spill, errdefs.ErrInvalidArgument)
		}
		s.Spill = filepath.Clean(spill)
	}
	if moves {
		for gpu := range strings.SplitSeq(gpus, ",") {
			if gpu = strings.TrimSpace(gpu); gpu == "" {
				return nil, fmt.Errorf("annotation %s is %q; it must be a list of GPUs: %w", annotations.ResumeGPUs, gpus, errdefs.ErrInvalidArgument)
			}
			s.GPUs = append(s.GPUs, gpu)
		}
	}
	return &s, nil
}
