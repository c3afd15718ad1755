// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

// A checkpoint that Create has looked at by way of a temporary mount is opened again where
// it lies by Start.
func TestReopen(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, images.ImageDir)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := images.WriteMetadata(dir, &images.Metadata{SchemaVersion: images.SchemaVersion, Created: time.Now().UTC()}); err != nil {
		t.Fatal(err)
	}
	r := &restoreState{mounted: root}
	if err := r.reopen(); err != nil || r.checkpoint == nil || r.mounted != "" {
		t.Errorf("got %+v, %v", r, err)
	}
}
