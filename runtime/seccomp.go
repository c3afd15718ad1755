// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	"golang.org/x/sys/unix"
)

// seccompMode is the mode that CRIU restores a thread with. Threads with the filters
// of the first have none in the images: CRIU has the kernel apply those of the
// first to all (seccomp(2), SECCOMP_FILTER_FLAG_TSYNC).
func (d *dumped) seccompMode(t dumpedTask, thread *criucore.ThreadCoreEntry) criucore.SeccompMode {
	if thread.SeccompMode != nil {
		return thread.GetSeccompMode()
	}
	if first := t.threads[0]; first.GetSeccompMode() == seccompFilter && synced(d.seccomp, first.SeccompFilter) {
		return seccompFilter
	}
	return criucore.SeccompMode_disabled
}

// synced says whether the filter of that number is applied to all threads.
func synced(all *seccomp.SeccompEntry, number *uint32) bool {
	filters := all.GetSeccompFilters()
	return number != nil && int64(*number) < int64(len(filters)) && filters[*number].GetFlags()&unix.SECCOMP_FILTER_FLAG_TSYNC != 0
}
