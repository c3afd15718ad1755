// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// Build a checkpoint image of a dump in an OCI layout, and verify every byte of it.
func ExampleBuild() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	// CRIU and the shim have written a dump.
	dump := filepath.Join(dir, "dump")
	if err := os.CopyFS(dump, os.DirFS("../testdata/schema-1")); err != nil {
		log.Fatal(err)
	}
	checkpoint, err := images.Open(dump)
	if err != nil {
		log.Fatal(err)
	}
	store, err := layout.Open(filepath.Join(dir, "layout"))
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	built, err := oci.Build(ctx, store, oci.Options{Checkpoint: checkpoint, Discard: true})
	if err != nil {
		log.Fatal(err)
	}
	if err := store.Tag(ctx, "example.com/job:1", built.Manifest); err != nil {
		log.Fatal(err)
	}
	report, err := oci.Verify(ctx, store, built.Manifest, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d layers, %d blocks of GPU state\n", report.Layers, report.Blocks)
	image, err := oci.Inspect(ctx, store, built.Manifest)
	if err != nil {
		log.Fatal(err)
	}
	for _, gpu := range image.Metadata.GPUs {
		fmt.Println("taken on:", gpu.Name)
	}
	// Output:
	// 3 layers, 1 blocks of GPU state
	// taken on: NVIDIA H200
}
