// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import "github.com/gpuckpt/gpuckpt/internal/proc"

// Area is a range of a process's addresses, End excluded.
type Area struct {
	Start uint64 `json:"start"`
	End   uint64 `json:"end"`
}

// Bytes returns the area's length.
func (a Area) Bytes() uint64 { return a.End - a.Start }

// AnonymousAreas returns the private anonymous rw-p areas of a process, ascending,
// without heap, stack and others that the kernel names. The driver's checkpoint
// puts GPU memory into one new area of this kind.
func AnonymousAreas(pid int) ([]Area, error) {
	mappings, err := proc.Maps(pid)
	if err != nil {
		return nil, err
	}
	return anonymous(mappings), nil
}

func anonymous(mappings []proc.Mapping) (areas []Area) {
	for _, m := range mappings {
		if m.Permissions == "rw-p" && m.Inode == 0 && m.Path == "" {
			areas = append(areas, Area{m.Start, m.End})
		}
	}
	return areas
}

// NewAreas returns what is in after and was not in before, ascending. Both must
// be ascending, as AnonymousAreas returns them. It compares addresses, not areas:
// the kernel may have joined a new area with an old neighbour.
func NewAreas(before, after []Area) []Area {
	var fresh []Area
	i := 0
	for _, a := range after {
		for i < len(before) && before[i].End <= a.Start {
			i++
		}
		for j := i; j < len(before) && before[j].Start < a.End; j++ {
			if before[j].Start > a.Start {
				fresh = append(fresh, Area{a.Start, before[j].Start})
			}
			a.Start = min(before[j].End, a.End)
		}
		if a.Start < a.End {
			fresh = append(fresh, a)
		}
	}
	return fresh
}
