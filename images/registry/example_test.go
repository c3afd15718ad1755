// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry_test

import (
	"context"
	"fmt"
	"io"
	stdlog "log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	server "github.com/google/go-containerregistry/pkg/registry"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
)

// Push an image. A second push of it sends nothing.
func ExamplePush() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		stdlog.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "inventory.img"), nil, 0o600); err != nil {
		stdlog.Fatal(err)
	}
	checkpoint, err := images.Open(dir, images.AllowWithoutGPU)
	if err != nil {
		stdlog.Fatal(err)
	}
	store, err := layout.Open(filepath.Join(dir, "layout"))
	if err != nil {
		stdlog.Fatal(err)
	}
	built, err := oci.Build(ctx, store, oci.Options{Checkpoint: checkpoint})
	if err != nil {
		stdlog.Fatal(err)
	}

	there := httptest.NewServer(server.New(server.Logger(stdlog.New(io.Discard, "", 0))))
	defer there.Close()
	ref := strings.TrimPrefix(there.URL, "http://") + "/job:1"
	options := registry.Options{
		Credentials: func(string) (user, secret string, err error) { return "", "", nil },
		Progress: func(s images.Step) {
			if s.Ended {
				fmt.Println(s.Note)
			}
		},
	}
	for range 2 {
		result, err := registry.Push(ctx, store, ref, built.Manifest, options)
		if err != nil {
			stdlog.Fatal(err)
		}
		fmt.Println("sent everything:", result.Moved == result.Bytes, "- found everything there:", result.Reused == result.Bytes)
	}
	// Output:
	// pushed
	// sent everything: true - found everything there: false
	// pushed
	// sent everything: false - found everything there: true
}
