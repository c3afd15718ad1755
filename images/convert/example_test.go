// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/gpuckpt/gpuckpt/images/convert"
)

// Write a dump as an archive as the kubelet keeps them, and open that. Neither needs
// containerd; for an image in containerd, Options.Dial connects to it.
func ExampleConvert() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "inventory.img"), nil, 0o600); err != nil {
		log.Fatal(err)
	}
	from, err := convert.ParseRef("dir:" + dir)
	if err != nil {
		log.Fatal(err)
	}
	to, err := convert.ParseRef("kubernetes-archive:" + filepath.Join(dir, "job.tar"))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := convert.Convert(ctx, from, to, convert.Options{}); err != nil {
		log.Fatal(err)
	}
	source, err := convert.Open(ctx, to, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer source.Close()
	fmt.Println("an image:", source.Image != nil)
	for _, file := range source.Checkpoint.Files {
		fmt.Println(file.Name)
	}
	// Output:
	// an image: false
	// config.dump
	// inventory.img
	// network.status
	// spec.dump
}
