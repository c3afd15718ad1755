// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/binary"
	"strings"
	"testing"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/internal/criu"
)

// returning is a filter that answers every call alike.
func returning(action uint32) *seccomp.SeccompFilter {
	return &seccomp.SeccompFilter{Filter: binary.LittleEndian.AppendUint32([]byte{6, 0, 0, 0}, action), Flags: proto.Uint32(0)}
}

// after puts a filter behind another one of the same thread.
func after(n uint32, f *seccomp.SeccompFilter) *seccomp.SeccompFilter {
	f.Prev = &n
	return f
}

// Of a thread's filters one must be as strict as the profile, whatever the others are.
func TestFilters(t *testing.T) {
	const allow, deny = 0x7fff0000, 0x00050001
	for name, c := range map[string]struct {
		filters []*seccomp.SeccompFilter
		last    uint32
		says    string // "" if they are taken
	}{
		"the profile's":           {[]*seccomp.SeccompFilter{returning(deny)}, 0, ""},
		"one that allows all":     {[]*seccomp.SeccompFilter{returning(allow)}, 0, "weaker than the spec's profile: it allows read"},
		"the program's own too":   {[]*seccomp.SeccompFilter{returning(deny), after(0, returning(allow))}, 1, ""},
		"of another thread alone": {[]*seccomp.SeccompFilter{returning(deny), returning(allow)}, 1, "weaker"},
		"a number too high":       {[]*seccomp.SeccompFilter{returning(deny)}, 1, "number 1, which there is not"},
		"before a number too high": {[]*seccomp.SeccompFilter{after(7, returning(allow))}, 0,
			"number 7, which there is not"},
		"itself":       {[]*seccomp.SeccompFilter{after(0, returning(allow))}, 0, "no end"},
		"each other":   {[]*seccomp.SeccompFilter{after(1, returning(allow)), after(0, returning(allow))}, 0, "no end"},
		"no program":   {[]*seccomp.SeccompFilter{{}}, 0, "cannot be compared"},
		"none at all":  {nil, 0, "no seccomp filter"},
		"the last one": {[]*seccomp.SeccompFilter{returning(allow), after(0, returning(deny))}, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			spec, dump := specOfTest(), dumpOfTest()
			spec.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActErrno}
			dump.Seccomp = &seccomp.SeccompEntry{SeccompFilters: c.filters}
			for _, thread := range dump.Tasks[0].Threads {
				thread.SeccompMode, thread.SeccompFilter = criucore.SeccompMode_filter.Enum(), &c.last
			}
			if c.filters == nil {
				for _, thread := range dump.Tasks[0].Threads {
					thread.SeccompFilter = nil
				}
			}
			_, err := Check(spec, dump, host)
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
			// In strict mode a thread needs none.
			for _, thread := range dump.Tasks[0].Threads {
				thread.SeccompMode, thread.SeccompFilter = criucore.SeccompMode_strict.Enum(), nil
			}
			if _, err := Check(spec, dump, host); err != nil {
				t.Errorf("strict mode: %v", err)
			}
		})
	}
	if !Filtered(&criu.Dump{}) {
		t.Error("no thread is without")
	}
}
