// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package burden

import (
	"os"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

func TestRefuseMappings(t *testing.T) {
	pid := os.Getpid()
	n, err := proc.CountMappings(pid, 1<<20)
	if err != nil || n < 10 {
		t.Fatal(n, err)
	}
	if err := refuseMappings([]int{pid, pid}, 4*n); err != nil {
		t.Error(err)
	}
	if err := refuseMappings([]int{pid, pid}, n+n/2); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "mappings of memory together") {
		t.Errorf("error %v", err)
	}
	const nobody = 1 << 30
	if err := refuseMappings([]int{nobody}, 1); err != nil {
		t.Errorf("of a process that has ended: %v", err)
	}
}
