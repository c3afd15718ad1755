// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"strings"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// Pair moves what was on GPU Old to GPU New. Both are UUIDs as GPU.UUID.
type Pair struct {
	Old string `json:"old"`
	New string `json:"new"`
}

// ParsePairs reads "OLD=NEW,OLD=NEW…", the form of cuda-checkpoint's
// --device-map. It refuses a map that cannot be a bijection: a GPU that is
// named twice on one side. An empty string is no pairs.
func ParsePairs(s string) ([]Pair, error) {
	if s == "" {
		return nil, nil
	}
	var pairs []Pair
	olds, news := map[string]bool{}, map[string]bool{}
	for field := range strings.SplitSeq(s, ",") {
		from, to, ok := strings.Cut(field, "=")
		if !ok {
			return nil, fmt.Errorf("GPU map: %q is not OLD=NEW", field)
		}
		o, err := wire.ParseUUID(from)
		if err != nil {
			return nil, fmt.Errorf("GPU map: %w", err)
		}
		n, err := wire.ParseUUID(to)
		if err != nil {
			return nil, fmt.Errorf("GPU map: %w", err)
		}
		p := Pair{Old: wire.FormatUUID(o), New: wire.FormatUUID(n)}
		if olds[p.Old] || news[p.New] {
			return nil, fmt.Errorf("GPU map: %q names a GPU a second time", field)
		}
		olds[p.Old], news[p.New] = true, true
		pairs = append(pairs, p)
	}
	return pairs, nil
}
