// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import "testing"

// Of a status only the name is a container's own; no line of it may become another's.
func FuzzStatus(f *testing.F) {
	f.Add([]byte("Name:\tjob\nState:\tS (sleeping)\nTgid:\t7\nPPid:\t1\nNSpid:\t7\t1\n"), "NSpid")
	f.Add([]byte("Name:\t\\nNSpid:\t1\nNSpid:\t0\n"), "Name")
	f.Fuzz(func(t *testing.T, text []byte, field string) {
		s := Status(text)
		s.Field(field)
		if pid, err := s.NSPID(); (err == nil) != (pid > 0) || err == nil && s.depth() == 0 {
			t.Errorf("%q has the pid %d of %d, %v", text, pid, s.depth(), err)
		}
		if bytes, known := ParseMemAvailable(text); !known && bytes != 0 || bytes%1024 != 0 {
			t.Errorf("%q has %d bytes of memory", text, bytes)
		}
	})
}
