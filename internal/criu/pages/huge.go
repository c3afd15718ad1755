// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// A mapping is filled with huge pages if it has fullOf of fullParts of its pages: what huge pages add
// to the container's memory is less than the rest.
const fullOf, fullParts = 15, 16

// isFull reports whether a mapping with so many bytes of memory is filled with huge pages.
func isFull(s span, bytes uint64) bool {
	return s.End-s.Start >= mmapfile.HugePage && bytes/fullOf >= (s.End-s.Start)/fullParts
}

// advise has CRIU advise MADV_HUGEPAGE for the mappings that are filled with huge pages. A page fault
// for each 4 KiB takes several times as long as the copy, and so does the end of such a process. The
// advice stays: no other process can take it back.
func (t *task) advise(m *mm.MmEntry) {
	for _, v := range m.GetVmas() {
		s := span{v.GetStart(), v.GetEnd()}
		if i := indexOf(t.full, s.Start); i < len(t.full) && t.full[i] == s && v.GetMadv()&(1<<unix.MADV_NOHUGEPAGE) == 0 {
			v.Madv = new(v.GetMadv() | 1<<unix.MADV_HUGEPAGE)
		}
	}
}
