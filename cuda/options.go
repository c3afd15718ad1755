// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
	"github.com/gpuckpt/gpuckpt/internal/node/fault"
)

// HelperName is the file name of the helper program.
const HelperName = "gpuckpt-cuda-helper"

// Options are how to start a helper. The zero value works.
type Options struct {
	// Path of the helper. Empty: beside the running executable, then in $PATH.
	Path string
	// LibraryDir has the driver's libraries. Empty: the loader of the host finds them.
	LibraryDir string
	// Join is a pid whose mount and pid namespaces the helper enters between loading this
	// namespace's driver library and initialising it: it then sees GPUs and pids as that process
	// does. 0 stays outside. Needed to restore onto GPUs other than the checkpoint's.
	Join int
	// Visible are the UUIDs of the GPUs that the driver is to bring up in the helper, which takes
	// 0.2 s for each that nobody else has open; Info lists no others. Empty: all. UUIDs finds them.
	// It serves other processes too, but for pairs: those want all that the process sees.
	Visible []string
	// Env is added to this program's environment, "KEY=value" each.
	Env []string
	// CallTimeout bounds Info, State, RestoreThread and Unlock, and is the grace that Lock gets
	// beyond its own timeout. 0: 30 s.
	CallTimeout time.Duration
	// CopyTimeout bounds Checkpoint and Restore, which copy all GPU memory in use (2 to 6 GB/s), a
	// Lock without timeout, and the undoing of a group's step. 0: 30 min.
	CopyTimeout time.Duration
	// StallTimeout bounds how long the processes may neither compute nor touch fresh memory while the
	// driver copies their GPU memory, in Checkpoint and Restore: the driver copies by a thread of each
	// process. Those of a Group are counted together. It needs their host pids. At most half of
	// CopyTimeout. 0: 1 min.
	StallTimeout time.Duration
	// Run starts the helper and returns what waits for its exit status (128 + N for signal N). A
	// program that reaps all its children, as containerd's shims do, passes its reaper here, which
	// would take the status otherwise. nil: exec.Cmd's Start and Wait.
	Run func(*exec.Cmd) (wait func() (int, error), err error)
}

func (o Options) withDefaults() Options {
	if o.CallTimeout <= 0 {
		o.CallTimeout = 30 * time.Second
	}
	if o.CopyTimeout <= 0 {
		o.CopyTimeout = 30 * time.Minute
	}
	if o.StallTimeout <= 0 {
		o.StallTimeout = time.Minute
	}
	o.CallTimeout, o.CopyTimeout = fault.Bound(o.CallTimeout), fault.Bound(o.CopyTimeout)
	o.StallTimeout = min(o.StallTimeout, o.CopyTimeout/2)
	return o
}

// command makes the helper's command, all but its standard error and socket.
func (o Options) command() (*exec.Cmd, error) {
	path, err := o.path()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path)
	// These would hide or reorder GPUs; a restore needs every GPU of a checkpoint visible.
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return name == wire.VisibleEnv || name == "CUDA_DEVICE_ORDER" || name == wire.JoinEnv || name == wire.DriverEnv
	}), o.Env...)
	if len(o.Visible) > 0 {
		cmd.Env = append(cmd.Env, wire.VisibleEnv+"="+strings.Join(o.Visible, ","))
	}
	if o.LibraryDir != "" {
		cmd.Env = append(cmd.Env, wire.DriverEnv+"="+o.LibraryDir)
	}
	if o.Join != 0 {
		cmd.Env = append(cmd.Env, wire.JoinEnv+"="+strconv.Itoa(o.Join))
	}
	return cmd, nil
}

func (o Options) path() (string, error) {
	if o.Path != "" {
		return o.Path, nil
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), HelperName)
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	path, err := exec.LookPath(HelperName)
	if err != nil {
		return "", fmt.Errorf("find CUDA helper beside this program or in $PATH: %w", err)
	}
	return path, nil
}
