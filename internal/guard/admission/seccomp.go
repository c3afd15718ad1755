// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"errors"
	"fmt"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"

	"github.com/gpuckpt/gpuckpt/internal/guard/admission/internal/seccomp"
)

var errNoFilter = errors.New("it has no seccomp filter, and the spec has one")

// seccomp compares the filters of a thread with the spec's profile. All filters of a thread hold at
// once, so one of them must be at least as strict as the profile; the others are the program's own.
func (a *allowance) seccomp(mode criucore.SeccompMode, last *uint32) error {
	profile := a.spec.Linux.Seccomp
	switch {
	case profile == nil || mode == criucore.SeccompMode_strict: // read, write and exit alone
		return nil
	case mode != criucore.SeccompMode_filter || last == nil:
		return errNoFilter
	case profile.DefaultAction == "" && len(profile.Syscalls) == 0: // none, for runc
		return nil
	}
	var err error
	for range len(a.filters) + 1 { // a chain, in which each may be once
		if uint64(*last) >= uint64(len(a.filters)) {
			return fmt.Errorf("its seccomp filter is number %d, which there is not", *last)
		}
		f := a.filters[*last]
		if err = a.judge(f.GetFilter()); err == nil {
			return nil
		}
		if last = f.Prev; last == nil {
			// The first one is what the runtime has set.
			return fmt.Errorf("its seccomp filter is weaker than the spec's profile: %w", err)
		}
	}
	return fmt.Errorf("its seccomp filters have no end: %w", errNoFilter)
}

// judge compares a filter with the profile. Most threads have the same one.
func (a *allowance) judge(program []byte) error {
	err, known := a.judged[string(program)]
	if !known {
		var f *seccomp.Filter
		if f, err = seccomp.Parse(program); err == nil {
			err = f.Within(a.spec.Linux.Seccomp)
		}
		a.judged[string(program)] = err
	}
	return err
}
