// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
)

const (
	seccompStrict = criucore.SeccompMode_strict
	seccompFilter = criucore.SeccompMode_filter
)

// seccompMode returns the mode that CRIU restores a thread with. Threads with the
// filters of the first thread have none in the images: CRIU has the kernel apply
// the filters of the first to all (seccomp(2), SECCOMP_FILTER_FLAG_TSYNC).
func seccompMode(d *criu.Dump, t criu.Task, thread *criucore.ThreadCoreEntry) criucore.SeccompMode {
	if thread.SeccompMode != nil {
		return thread.GetSeccompMode()
	}
	if first := t.Threads[0]; first.GetSeccompMode() == seccompFilter && synced(d.Seccomp, first.SeccompFilter) {
		return seccompFilter
	}
	return criucore.SeccompMode_disabled
}

// synced reports whether the filter of that number is applied to all threads.
func synced(all *seccomp.SeccompEntry, number *uint32) bool {
	filters := all.GetSeccompFilters()
	return number != nil && int64(*number) < int64(len(filters)) && filters[*number].GetFlags()&unix.SECCOMP_FILTER_FLAG_TSYNC != 0
}
