// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/rootfs"
)

// A root file system that cannot be looked at by its directories is mounted for
// the look, without its writable layer, and is gone after it.
func TestVisitByMount(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting takes root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil { // an overlay needs a file system of its own here and there
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	for _, name := range []string{"a:b/" + images.ImageDir, "lower", "upper", "work"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	checkpoint := filepath.Join(dir, "a:b", images.ImageDir)
	if err := images.WriteMetadata(checkpoint, &images.Metadata{SchemaVersion: images.SchemaVersion, Created: time.Now().UTC()}); err != nil {
		t.Fatal(err)
	}
	look := rootfs.Of(&taskAPI.CreateTaskRequest{Rootfs: []*types.Mount{{Type: "overlay", Source: "overlay", Options: []string{
		"workdir=" + filepath.Join(dir, "work"), "upperdir=" + filepath.Join(dir, "upper"),
		"lowerdir=" + filepath.Join(dir, `a\:b`) + ":" + filepath.Join(dir, "lower"),
	}}}}, "")
	if look.Dirs != nil {
		t.Fatalf("looked at directly: %v", look.Dirs)
	}
	var root string
	err := look.Visit(t.Context(), func(roots []string) error {
		root = roots[0]
		found, err := images.OpenImage(roots...)
		if err == nil && !strings.HasPrefix(found.Dir, root) {
			t.Errorf("found in %s", found.Dir)
		}
		if err := os.WriteFile(filepath.Join(root, "x"), nil, 0o600); err == nil {
			t.Error("it is writable")
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", root, err)
	}
	r := &restoreState{mounted: filepath.Join(dir, "a:b")}
	if err := r.reopen(); err != nil || r.checkpoint == nil || r.mounted != "" {
		t.Errorf("got %+v, %v", r, err)
	}
}
