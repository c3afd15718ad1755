// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// What does not freeze is told of in the end, and holds nobody up for ever.
func TestAwaitFreezer(t *testing.T) {
	file := filepath.Join(t.TempDir(), "freezer.state")
	if err := awaitFreezer(file, "FROZEN", time.Minute); err != nil {
		t.Error(err)
	}
	// It takes what is written, and has nothing to say.
	if err := awaitFreezer(os.DevNull, "FROZEN", 10*time.Millisecond); !errdefs.IsUnavailable(err) {
		t.Errorf("got %v", err)
	}
	if err := awaitFreezer(filepath.Join(file, "none"), "THAWED", time.Minute); err == nil {
		t.Error("no error")
	}
}
