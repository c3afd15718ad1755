// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"errors"
	"testing"
)

func TestIsUnsent(t *testing.T) {
	for said, want := range map[string]bool{
		`criu failed: type DUMP errno 0; CRIU said: Error (soccr/soccr.c:371): 	recv failed (3830729, want 3863497): Resource temporarily unavailable; its log: x`: true,
		`criu failed: type DUMP errno 0; CRIU said: Error (soccr/soccr.c:371): 	Unable to set TCP_QUEUE: Invalid argument; its log: x`:                             false,
		`criu failed: type DUMP errno 0; CRIU said: Error (criu/sk-unix.c:1): recv failed (1, want 2); its log: x`:                                                 false,
	} {
		if got := IsUnsent(errors.New(said)); got != want {
			t.Errorf("%q: %t", said, got)
		}
	}
}
