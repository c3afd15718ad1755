// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// envHome marks the processes of an instance, with its directory.
	envHome = "GPUCKPT_HARNESS"
	// homePrefix begins the name of every instance's directory.
	homePrefix = "gpuckpt-"
	// containerdRun is where containerd and its shims keep sockets and runc's
	// state, whatever their configuration says (containerd/v2/defaults).
	containerdRun = "/run/containerd"
)

// home is the directory of an instance. Its name alone tells all that belongs to
// the instance, so that one whose program was killed can be cleaned up too.
type home struct {
	dir string
}

// newHome makes a directory for an instance and notes this program as its owner.
func newHome(parent string) (home, error) {
	dir, err := os.MkdirTemp(parent, homePrefix)
	if err != nil {
		return home{}, fmt.Errorf("make containerd's directory: %w", err)
	}
	h := home{dir: dir}
	start, err := processStart(os.Getpid())
	if err == nil { // containers of other users look for their bundles below it
		err = os.Chmod(dir, 0o711) //nolint:gosec // as containerd's own directories
	}
	if err == nil {
		err = os.WriteFile(h.owner(), fmt.Appendf(nil, "%d %s", os.Getpid(), start), 0o600)
	}
	for _, sub := range []string{h.temp(), h.logs(), h.fifos()} {
		if err == nil {
			err = os.Mkdir(sub, 0o700)
		}
	}
	if err != nil {
		_ = os.RemoveAll(dir)
		return home{}, fmt.Errorf("make containerd's directory: %w", err)
	}
	return h, nil
}

func (h home) name() string       { return filepath.Base(h.dir) }
func (h home) owner() string      { return filepath.Join(h.dir, "owner") }
func (h home) root() string       { return filepath.Join(h.dir, "root") }
func (h home) state() string      { return filepath.Join(h.dir, "state") }
func (h home) temp() string       { return filepath.Join(h.dir, "tmp") }
func (h home) logs() string       { return filepath.Join(h.dir, "logs") }
func (h home) fifos() string      { return filepath.Join(h.dir, "fifo") }
func (h home) socket() string     { return filepath.Join(h.dir, "c.sock") }
func (h home) log() string        { return filepath.Join(h.dir, "containerd.log") }
func (h home) config() string     { return filepath.Join(h.dir, "containerd.toml") }
func (h home) shimConfig() string { return filepath.Join(h.dir, "config.toml") }

// abandoned says whether the program that made the directory is gone.
func (h home) abandoned() bool {
	data, err := os.ReadFile(h.owner())
	if err != nil {
		return false // not one of ours, or just being made
	}
	pidText, start, ok := strings.Cut(string(data), " ")
	pid, err := strconv.Atoi(pidText)
	if !ok || err != nil {
		return false
	}
	now, err := processStart(pid)
	if err != nil || now != start {
		return true
	}
	state, err := ProcessState(pid) // its parent may not have asked for it yet
	return err != nil || state == "Z"
}

// sweep cleans up the instances in a directory whose programs are gone.
func sweep(parent string, logf func(string, ...any)) {
	dirs, err := filepath.Glob(filepath.Join(parent, homePrefix+"*"))
	if err != nil {
		return
	}
	for _, dir := range dirs {
		if h := (home{dir: dir}); h.abandoned() {
			err := h.clean()
			logf("cleaned up %s, whose program was killed: error %v", dir, err)
		}
	}
}

// clean ends by force what still runs of an instance and removes all of it. It
// goes on after a failure; the error names each. The directory stays while a
// process or a mount of the instance does.
func (h home) clean() error {
	var errs []error
	rest := slices.Concat(h.shimSockets(), h.runcStates(), openFIFOs(h.processes()))
	if err := h.kill(); err != nil {
		errs = append(errs, err)
	}
	if err := unmountUnder(h.dir); err != nil {
		errs = append(errs, err)
	}
	if err := removeCgroups(h.name()); err != nil {
		errs = append(errs, err)
	}
	for _, path := range append(rest, filepath.Join(containerdRun, "runc", h.name())) {
		if err := os.RemoveAll(path); err != nil {
			errs = append(errs, fmt.Errorf("remove the rest of %s: %w", h.name(), err))
		}
	}
	if len(errs) == 0 {
		if err := os.RemoveAll(h.dir); err != nil {
			errs = append(errs, fmt.Errorf("remove containerd's directory: %w", err))
		}
	}
	return errors.Join(errs...)
}

// shimSockets are the sockets of the shims that have not ended in order. A shim
// writes its address into its bundle (containerd/v2/core/runtime/v2, "bootstrap.json").
func (h home) shimSockets() []string {
	files, err := filepath.Glob(filepath.Join(h.state(), "io.containerd.runtime.v2.task", "*", "*", "bootstrap.json"))
	if err != nil {
		return nil
	}
	var sockets []string
	for _, file := range files {
		var bootstrap struct {
			Address string `json:"address"`
		}
		data, err := os.ReadFile(file)
		if err != nil || json.Unmarshal(data, &bootstrap) != nil {
			continue
		}
		path := strings.TrimPrefix(bootstrap.Address, "unix://")
		if strings.HasPrefix(path, containerdRun+"/s/") {
			sockets = append(sockets, path)
		}
	}
	return sockets
}

// runcStates are the directories of runc's state of the containers that were not
// ended in order. Those in a namespace that others use as well are named one by one.
func (h home) runcStates() []string {
	bundles, err := filepath.Glob(filepath.Join(h.state(), "io.containerd.runtime.v2.task", "*", "*"))
	if err != nil {
		return nil
	}
	var states []string
	for _, bundle := range bundles {
		namespace, id := filepath.Base(filepath.Dir(bundle)), filepath.Base(bundle)
		states = append(states, filepath.Join(containerdRun, "runc", namespace, id))
	}
	return states
}

// kill ends every process of the instance, and waits until they are gone.
func (h home) kill() error {
	for deadline := time.Now().Add(endLimit); ; {
		pids := h.processes()
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("end the processes of %s: %v still run", h.name(), pids)
		}
		thawCgroup(h.name())
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// processes are the living processes of the instance: those that have its mark
// in their environment (the daemon, shims, runc, CRIU, the helper) and those in
// its cgroups (the containers).
func (h home) processes() []int {
	pids := cgroupPIDs(h.name())
	all, err := numericNames("/proc")
	if err != nil {
		return pids
	}
	mark := []byte(envHome + "=" + h.dir)
	for _, pid := range all {
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err == nil && slices.ContainsFunc(bytes.Split(environ, []byte{0}), func(v []byte) bool { return bytes.Equal(v, mark) }) {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return slices.DeleteFunc(slices.Compact(pids), func(pid int) bool {
		state, err := ProcessState(pid)
		return err != nil || state == "Z" || state == "X"
	})
}

// unmountUnder unmounts all that is mounted at or below a directory, the last
// mounted first.
func unmountUnder(dir string) error {
	points, err := MountsUnder(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, point := range slices.Backward(points) {
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("unmount %s: %w", point, err))
		}
	}
	return errors.Join(errs...)
}
