// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hung

import (
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// TestManyMounts has a container mount any number of file systems that do not answer: each would take a thread of the shim.
func TestManyMounts(t *testing.T) {
	table := func(servers int) *strings.Reader {
		var text strings.Builder
		for i := range servers {
			fmt.Fprintf(&text, "%d 1 0:%d / /mnt/%d rw - %s server rw\n", 2*i+2, i, i, []string{"fuse.s3", "nfs4"}[i%2])
			fmt.Fprintf(&text, "%d 1 0:1 / /tmp/%d rw - tmpfs tmpfs rw\n", 2*i+3, i)
		}
		return strings.NewReader(text.String())
	}
	if mounts, err := read(table(most)); err != nil || len(mounts) != most {
		t.Errorf("%d mounts, %v", len(mounts), err)
	}
	if mounts, err := read(table(most + 1)); !errdefs.IsFailedPrecondition(err) || len(mounts) > 0 {
		t.Errorf("%d mounts, %v", len(mounts), err)
	}
}
