// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import "github.com/gpuckpt/gpuckpt/internal/node/proc"

// Range is a range of a process's addresses, End excluded.
type Range struct {
	Start uint64 `json:"start"`
	End   uint64 `json:"end"`
}

// Bytes returns the range's length.
func (r Range) Bytes() uint64 { return r.End - r.Start }

// AnonymousRanges returns the private anonymous rw-p ranges of a process, ascending, without heap,
// stack and others that the kernel names. The driver puts GPU memory into a new one.
func AnonymousRanges(pid int) ([]Range, error) {
	mappings, err := proc.Maps(pid, isAnonymous)
	if err != nil {
		return nil, err
	}
	return ranges(mappings), nil
}

func isAnonymous(m *proc.Mapping) bool {
	return m.Permissions == "rw-p" && m.Inode == 0 && m.Path == ""
}

func ranges(mappings []proc.Mapping) (ranges []Range) {
	for _, m := range mappings {
		ranges = append(ranges, Range{m.Start, m.End})
	}
	return ranges
}

// NewRanges returns what is in after and was not in before; all are ascending. It compares
// addresses, not ranges: the kernel may have joined a new range with an old neighbour.
func NewRanges(before, after []Range) []Range {
	var fresh []Range
	i := 0
	for _, a := range after {
		for i < len(before) && before[i].End <= a.Start {
			i++
		}
		for j := i; j < len(before) && before[j].Start < a.End; j++ {
			if before[j].Start > a.Start {
				fresh = append(fresh, Range{a.Start, before[j].Start})
			}
			a.Start = min(before[j].End, a.End)
		}
		if a.Start < a.End {
			fresh = append(fresh, a)
		}
	}
	return fresh
}
