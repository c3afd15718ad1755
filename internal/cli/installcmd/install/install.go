// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package install puts a release of gpuckpt on a node and takes it off again.
//
// The life of an installation: Install copies the programs below a prefix, each by rename, so that
// containers that run keep the shim they have. It then has containerd's configuration name the
// shim, and asks containerd itself whether the configuration means what it meant before, with the
// runtime added. What it did is in a record, which the next Install and Uninstall read. A failure
// leaves the node as it was, with the version before, if there was one. Only Restart makes containerd read it.
package install

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

const (
	// ShimName is the file name of the shim.
	ShimName = proc.ShimName
	// recordFile is where the record is, below the root.
	recordFile = "/var/lib/gpuckpt/installed.json"
	// lockFile is locked by the one Install or Uninstall that is at work below the root.
	lockFile = "/run/gpuckpt-install.lock"
)

// ErrInUse is the error of an Uninstall while containers run with the shim.
var ErrInUse = errors.New("containers still run with gpuckpt's shim")

// Options are what to install where. All paths but Root and Source are as the node sees them.
type Options struct {
	// Root is where the node's root is mounted, "/" on the node itself.
	Root string
	// Source is the directory of a release, with bin and lib. If it is the prefix, as a package has
	// it, nothing is copied.
	Source string
	// Prefix is the directory to install below. Empty: the source, if it is /usr or one of Prefixes,
	// else that of the last installation, else the first of Prefixes that can be written and
	// executed from.
	Prefix string
	// Config is containerd's configuration. Empty: that of k3s or RKE2 where there is one, else
	// /etc/containerd/config.toml.
	Config string
	// Containerd is the program that is asked about Config. Empty: the first in the usual
	// directories.
	Containerd string
	// WithoutContainerd leaves containerd's configuration alone: ctr and nerdctl need none.
	WithoutContainerd bool
	// Restart restarts containerd if its configuration has changed, by the command RestartCommand
	// or, without one, by systemctl.
	Restart        bool
	RestartCommand string
	// Record is the file of the record. Empty: the usual one.
	Record string
	// Settings is a directory with what configures the node, as this program sees it: config.toml, and the
	// directories keys, recipients and decryption-keys, with a directory for each source of files. What
	// the last Install had and this one lacks is removed. Empty: the node's settings are left alone.
	Settings string
	// Force uninstalls while containers run with the shim.
	Force bool
}

// Prefixes are where programs go, by preference. Some systems mount /usr read-only.
var Prefixes = []string{"/usr/local", "/opt/gpuckpt", "/home/kubernetes/bin/gpuckpt", "/var/lib/gpuckpt"}

// Result is what was done.
type Result struct {
	Version string `json:"version"`
	Prefix  string `json:"prefix"`
	// Changed are the files that were written or removed.
	Changed []string `json:"changed"`
	// Config is the file that makes containerd know the runtime, "" for none.
	Config string `json:"config,omitempty"`
	// Restart is whether containerd must be restarted to read its configuration, and was not.
	Restart bool `json:"restart"`
}

// record is what Install has done, for the next Install and for Uninstall.
type record struct {
	Version string   `json:"version"`
	Prefix  string   `json:"prefix"`
	Files   []string `json:"files"` // copied
	Dirs    []string `json:"dirs"`  // made
	Edits   []edit   `json:"edits"` // files of containerd and of the node, in order
	// Unread is while containerd is to be restarted by an Install with Restart, which may be killed before.
	Unread bool `json:"unread,omitempty"`
}

// Install installs a release. It may be called again, with the same release or another. On an error
// the node is as it was, unless the error says what stays, or what could not be put back.
func Install(ctx context.Context, o Options) (result Result, err error) {
	defer wrap(&err, "install gpuckpt")
	o.Root, o.Record = filepath.Clean(o.Root), cmp.Or(o.Record, recordFile)
	end, err := o.lock()
	if err != nil {
		return Result{}, err
	}
	defer end()
	old, err := o.readRecord()
	if err != nil {
		return Result{}, err
	}
	if o.Prefix == "" {
		if o.Prefix, err = o.choosePrefix(old); err != nil {
			return Result{}, err
		}
	}
	now := record{Version: version.Short(), Prefix: o.Prefix, Edits: slices.Clone(old.Edits), Dirs: old.Dirs, Files: old.Files}
	result = Result{Version: now.Version, Prefix: o.Prefix}
	changes := newChanges(o, &now, &result)
	defer func() { err = changes.end(ctx, old, err) }()
	var files []string
	if o.at(o.Prefix) != o.Source {
		if files, err = changes.copyTree(); err != nil {
			return result, err
		}
	} else if o.Prefix == old.Prefix { // by what it installed: they stay, and go with Uninstall
		files = old.Files
	}
	before := len(result.Changed)
	if !o.WithoutContainerd {
		now.Unread = o.Restart
		if result.Config, err = o.configure(ctx, changes); err != nil {
			return result, err
		}
	}
	result.Restart = old.Unread || len(result.Changed) > before
	now.Unread = result.Restart && (o.Restart || old.Unread)
	if !o.WithoutContainerd {
		if err := o.offerCRIU(changes); err != nil {
			return result, err
		}
	}
	if err := o.writeFeatures(ctx, changes); err != nil {
		return result, err
	}
	var wanted map[string]bool
	if o.Settings != "" {
		if wanted, err = o.writeSettings(changes); err != nil {
			return result, err
		}
	}
	if err := o.writeRecord(&now); err != nil {
		return result, err
	}
	if o.Restart && result.Restart {
		changes.restarted = true
		if err := o.restart(ctx); err != nil {
			return result, err
		}
		result.Restart, now.Unread = false, false
	}
	// containerd may have read what is new: it stays from here on, whatever fails.
	old, changes = now, newChanges(o, &now, &result)
	old.Edits = changes.edits
	if o.Settings != "" {
		if err := o.dropSettings(&now, wanted, &result); err != nil {
			return result, err
		}
	}
	// Files of the version before that this one does not have go last.
	for _, file := range old.Files {
		if !slices.Contains(files, file) {
			if err := os.Remove(o.at(file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return result, err
			}
			result.Changed = append(result.Changed, file)
		}
	}
	now.Files = files
	return result, o.writeRecord(&now)
}

// Uninstall takes off what Install put on. Without a record it does nothing. An error may leave a
// part; Uninstall may be called again.
func Uninstall(ctx context.Context, o Options) (result Result, err error) {
	defer wrap(&err, "uninstall gpuckpt")
	o.Root, o.Record = filepath.Clean(o.Root), cmp.Or(o.Record, recordFile)
	end, err := o.lock()
	if err != nil {
		return Result{}, err
	}
	defer end()
	old, err := o.readRecord()
	if err != nil || old.Prefix == "" {
		return Result{}, err
	}
	result = Result{Version: old.Version, Prefix: old.Prefix}
	shim := filepath.Join(old.Prefix, "bin", ShimName)
	if pids := o.running(shim); len(pids) > 0 && !o.Force && len(old.Files) > 0 {
		return result, fmt.Errorf("%w (pid %s): remove them first, or use --force: then they run on, but can be neither checkpointed nor resumed", ErrInUse, strings.Join(pids, ", "))
	}
	if err := newChanges(o, &old, &result).undo(); err != nil {
		return result, err
	}
	result.Restart = slices.ContainsFunc(result.Changed, func(f string) bool { return !strings.Contains(f, featuresDir) && !isSetting(f) })
	if o.Restart && result.Restart {
		if err := o.restart(ctx); err != nil {
			return result, err
		}
		result.Restart = false
	}
	for _, file := range old.Files {
		if err := os.Remove(o.at(file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return result, err
		}
		result.Changed = append(result.Changed, file)
		o.removeBeside(file)
	}
	o.removeBeside(o.Record)
	if err := errors.Join(os.RemoveAll(o.at(agentKeys)), os.Remove(o.at(o.Record))); err != nil {
		return result, err
	}
	o.removeEmpty()
	for _, dir := range slices.Backward(old.Dirs) { // the innermost first
		_ = os.Remove(o.at(dir)) // others may have put files there
	}
	for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/memory"} {
		_ = os.Remove(o.at(filepath.Join(hierarchy, config.Default().Staging.Cgroup))) // it stays while somebody is in it
	}
	return result, nil
}

// removeEmpty removes the directories that shims have made where nothing is left in them, and what they have
// remembered of CRIU until the next boot.
func (o Options) removeEmpty() {
	for _, file := range []string{"/run/gpuckpt/criu", "/run/gpuckpt/network-lock"} {
		_ = os.Remove(o.at(file))
	}
	records := config.Default().StateDir
	for _, pattern := range []string{records + "/*", records, "/var/lib/gpuckpt/checkpoints", "/run/gpuckpt/quota/*", "/run/gpuckpt/quota", "/run/gpuckpt"} {
		dirs, _ := filepath.Glob(o.at(pattern))
		for _, dir := range dirs {
			_ = syscall.Rmdir(dir) // which leaves files, and directories that have any
		}
	}
}

func wrap(err *error, doing string) {
	if *err != nil {
		*err = fmt.Errorf("%s: %w", doing, *err)
	}
}

// lock refuses a second one at once, which has the same temporary names. One that is killed loses its lock. A root
// without /run is no node's that runs.
func (o Options) lock() (end func(), err error) {
	path := o.at(lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return func() {}, nil
	}
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	mine, _ := f.Stat()
	if now, serr := os.Stat(path); err == nil && (serr != nil || !os.SameFile(mine, now)) { // whose it was has removed it
		err = unix.EWOULDBLOCK
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("another gpuckpt install or uninstall is at work on this node: run this again when it has ended: %s: %w", path, err)
	}
	return func() {
		_ = os.Remove(path)
		_ = f.Close()
	}, nil
}

// at returns where a path of the node is for this program.
func (o Options) at(path string) string { return filepath.Join(o.Root, path) }

func (o Options) readRecord() (r record, err error) {
	data, err := os.ReadFile(o.at(o.Record))
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		return record{}, fmt.Errorf("read what is installed: %s: %w", o.at(o.Record), err)
	}
	return r, nil
}

func (o Options) writeRecord(r *record) error {
	if err := r.makeDirs(o.Root, filepath.Dir(o.Record)); err != nil {
		return err
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(o.at(o.Record), data, 0o644)
}

// choosePrefix returns the source where that is a prefix already, as a package's is; else the
// prefix of the last installation, or the first that can be used.
func (o Options) choosePrefix(old record) (string, error) {
	if o.Root == "/" && (o.Source == "/usr" || slices.Contains(Prefixes, o.Source)) {
		return o.Source, nil
	}
	if old.Prefix != "" {
		return old.Prefix, nil
	}
	var why []error
	for _, prefix := range Prefixes {
		err := o.usable(prefix)
		if err == nil {
			return prefix, nil
		}
		why = append(why, err)
	}
	return "", fmt.Errorf("no directory can be written and executed from; name one with --prefix: %w", errors.Join(why...))
}

// usable reports why a directory, or the nearest parent that exists, cannot have programs.
func (o Options) usable(dir string) error {
	dir = o.at(dir)
	for ; dir != o.Root; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); err == nil {
			break
		}
	}
	f, err := os.CreateTemp(dir, ".gpuckpt-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString("#!/bin/false\n")
	if err = errors.Join(err, f.Chmod(0o700), f.Close()); err != nil {
		return err
	}
	// On a file system that is mounted noexec nothing can be run; ETXTBSY and the exit status of
	// false are no obstacles.
	if err := exec.Command(f.Name()).Run(); errors.Is(err, syscall.EACCES) {
		return err
	}
	return nil
}

// running returns the pids of processes that run a program.
func (o Options) running(program string) (pids []string) {
	links, _ := filepath.Glob(o.at("/proc/[0-9]*/exe"))
	for _, link := range links {
		if exe, err := os.Readlink(link); err == nil && strings.TrimSuffix(exe, " (deleted)") == program {
			pids = append(pids, filepath.Base(filepath.Dir(link)))
		}
	}
	return pids
}
