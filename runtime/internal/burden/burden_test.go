// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package burden

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

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

// A dump has room, and what processes share since a fork leaves half of the room to others.
func TestRefuseMemory(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	for name, test := range map[string]struct {
		memory, takes, room, limit uint64
		refused                    error
	}{
		"one process":                       {3 * gib, 3 * gib, 4 * gib, 0, nil},
		"what is paged out too":             {3 * gib, 2 * gib, 4 * gib, 0, nil},
		"32 workers of a server of 2 GiB":   {33 * 2 * gib, 3 * gib, 500 * gib, 0, nil},
		"16 loaders of a program of 20 GiB": {17 * 20 * gib, 22 * gib, 800 * gib, 0, nil},
		"no room":                           {5 * gib, 5 * gib, 4 * gib, 0, unix.ENOSPC},
		"more than half of the room":        {40 * gib, 256 * mib, 60 * gib, 0, errdefs.ErrFailedPrecondition},
		"more than the node's limit":        {3 * gib, 256 * mib, 500 * gib, 2 * gib, errdefs.ErrFailedPrecondition},
		"less than the node's limit":        {3 * gib, 256 * mib, 4 * gib, 3 * gib, nil},
	} {
		if err := refuseMemory(test.memory, test.takes, test.room, test.limit); !errors.Is(err, test.refused) {
			t.Errorf("%s: error %v, want %v", name, err, test.refused)
		}
	}
}
