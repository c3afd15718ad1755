// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpus

import (
	"context"
	"testing"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// makeNode makes a device node of the host.
func makeNode(path string, d specs.LinuxDevice) error {
	return unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(uint32(d.Major), uint32(d.Minor))))
}

// gpuNode is the node that the harness gives containers for a GPU.
func gpuNode(t *testing.T, index int) specs.LinuxDevice {
	t.Helper()
	spec := &oci.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
	for _, opt := range gpu.SpecOpts(index) {
		if err := opt(context.Background(), nil, nil, spec); err != nil {
			t.Fatal(err)
		}
	}
	return spec.Linux.Devices[len(spec.Linux.Devices)-1]
}

func nodeMajor(t *testing.T) int64 { return gpuNode(t, 0).Major }
func nodeMinor(t *testing.T) int64 { return gpuNode(t, 0).Minor }
