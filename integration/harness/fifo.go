// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// fifoDir is where "ctr containers restore" makes the FIFOs of a task, in a
// directory for each (containerd/v2/defaults: DefaultFIFODir). They go when ctr
// deletes the task; those of a restore that failed, or of a task that was ended
// otherwise, stay, and are removed here.
const fifoDir = containerdRun + "/fifo"

// openFIFOs are the directories of the FIFOs in fifoDir that processes have open.
func openFIFOs(pids []int) []string {
	dirs := map[string]bool{}
	for _, pid := range pids {
		links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if err != nil {
			continue
		}
		for _, link := range links {
			if path, err := os.Readlink(link); err == nil && filepath.Dir(filepath.Dir(path)) == fifoDir {
				dirs[filepath.Dir(path)] = true
			}
		}
	}
	return slices.Collect(maps.Keys(dirs))
}

// removeDeadFIFOs removes the FIFOs that were made since then for a container of
// that id and that nothing has open: another instance's have their shim.
func removeDeadFIFOs(id string, since time.Time) {
	files, err := filepath.Glob(filepath.Join(fifoDir, "*", id+"-stdout"))
	if err != nil || len(files) == 0 {
		return
	}
	pids, err := numericNames("/proc")
	if err != nil {
		return
	}
	open := openFIFOs(pids)
	for _, file := range files {
		dir := filepath.Dir(file)
		info, err := os.Stat(dir)
		if err == nil && info.ModTime().After(since) && !slices.Contains(open, dir) {
			_ = os.RemoveAll(dir)
		}
	}
}
