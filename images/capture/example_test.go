// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture_test

import (
	"context"
	"fmt"
	"log"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/capture"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// Take a checkpoint of a container that runs on, as the image example.com/job:2, which
// stores only what has changed since example.com/job:1.
func ExampleContainers() {
	c, err := client.New("/run/containerd/containerd.sock")
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	ctx := namespaces.WithNamespace(context.Background(), "default")
	all, err := capture.Containers(ctx, c, []capture.Target{{ID: "job", Image: "example.com/job:2", Previous: "example.com/job:1"}}, capture.Options{
		LeaveRunning: true,
		Build:        oci.Options{Compression: oci.Zstd},
		Progress: func(s images.Step) {
			log.Printf("%s: %d of %d bytes %s", s.Name, s.Done, s.Total, s.Note)
		},
	})
	if err != nil {
		log.Fatal(err) // the container is as it was, and there is no image
	}
	made := all[0]
	fmt.Printf("%s@%s: paused for %.2f s, %d of %d bytes are new\n",
		made.Image, made.Digest, made.PausedSeconds, made.Written, made.Bytes)
}
