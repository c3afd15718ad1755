// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/images"
)

// CheckpointAnswer is what "gpuckpt checkpoint --json" prints: digests, bytes and
// seconds, by the names that they have there.
type CheckpointAnswer struct {
	Digest                                     string
	Running                                    bool
	GPUBytes, Bytes, WrittenBytes, ReusedBytes uint64
	GPUWrittenBytes, GPUReusedBytes            uint64
	PausedSeconds, Seconds                     float64
	DumpSeconds, BuildSeconds                  float64
}

// TransferAnswer is what "gpuckpt image push --json" and "pull --json" print.
type TransferAnswer struct {
	Digest                         string
	Bytes, MovedBytes, ReusedBytes uint64
	GPUBytes, GPUReusedBytes       uint64
}

// Dumps is the directory in which the command line gpuckpt makes its dumps for
// the instance's containers.
func (c *Containerd) Dumps() string { return filepath.Join(c.home.dir, "dumps") }

// Gpuckpt runs the command line gpuckpt on the instance, in its machine if it has one, and reads what it
// answers with --json into answer.
func (c *Containerd) Gpuckpt(ctx context.Context, answer any, args ...string) error {
	args = append(args, "--json")
	cmd, err := c.Command(ctx, "gpuckpt", args...)
	if err != nil {
		return err
	}
	cmd.Env = append(cmd.Env, "CONTAINERD_ADDRESS="+c.Address(), "CONTAINERD_NAMESPACE="+c.Namespace(), "GPUCKPT_IMAGE_PATH="+c.Dumps())
	out, err := c.output(c.MachineCommand(cmd), "gpuckpt", args)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), answer); err != nil {
		return fmt.Errorf("gpuckpt %s --json: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// ForgetImages removes all images but the workload's from the instance, and with
// them their blobs and snapshots, unless containers use those.
func (c *Containerd) ForgetImages(ctx context.Context) error {
	list, err := c.client.ImageService().List(ctx)
	if err != nil {
		return fmt.Errorf("list the images: %w", err)
	}
	for _, image := range list {
		if image.Name == WorkloadImage {
			continue
		}
		if err := c.client.ImageService().Delete(ctx, image.Name, images.SynchronousDelete()); err != nil {
			return fmt.Errorf("remove the image %s: %w", image.Name, err)
		}
	}
	return nil
}
