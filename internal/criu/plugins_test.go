// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"testing"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
)

// CRIU keeps seven bits of what a process has ended with.
func TestEnded(t *testing.T) {
	core := func(state, status uint32) *criucore.CoreEntry {
		return &criucore.CoreEntry{Tc: &criucore.TaskCoreEntry{TaskState: &state, ExitCode: &status}}
	}
	for _, test := range []struct {
		file string
		core *criucore.CoreEntry
		want string
	}{
		{"core-7.img", core(2, 200<<8), " 7:200"}, {"core-7.img", core(2, 127<<8), ""}, {"core-7.img", core(2, 9), ""},
		{"core-7.img", core(1, 200<<8), ""}, {"core-7.img", &criucore.CoreEntry{}, ""}, {"core.img", core(2, 200<<8), ""},
	} {
		if got := Ended(test.file, test.core); got != test.want {
			t.Errorf("%s, %v: %q, want %q", test.file, test.core, got, test.want)
		}
	}
}
