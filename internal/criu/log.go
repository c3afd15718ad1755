// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Log is a log that CRIU writes.
type Log struct {
	// Path is where runc and its shim leave it. The bundle goes with the task, so
	// the log of a failure is kept elsewhere.
	Path string
	// Kept is where it is kept: one log of each kind for a container.
	Kept string
	// Settings is the configuration file that CRIU was given.
	Settings string
}

// dumpLog is the log of a dump that failed, in the container's bundle.
const dumpLog = "criu-dump.log"

// KeepDumpLog keeps the log of a dump that failed, whose directory goes. Without, there is no DumpLog.
func KeepDumpLog(bundle, work string) {
	log, err := os.Open(filepath.Join(work, "dump.log"))
	if err != nil {
		return
	}
	defer log.Close()
	if to, err := os.OpenFile(filepath.Join(bundle, dumpLog), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600); err == nil {
		_, _ = io.Copy(to, tail(log))
		_ = to.Close()
	}
}

// DumpLog returns the log of a dump of the container in a bundle. id names the container among all of
// the node.
func DumpLog(bundle, dir, id string) Log {
	return Log{filepath.Join(bundle, dumpLog), filepath.Join(dir, id+"-dump.log"), filepath.Join(bundle, SettingsName)}
}

// RestoreLog returns the log of a restore of the container in a bundle. workDir is
// where runc lets CRIU work.
func RestoreLog(bundle, workDir, dir, id string) Log {
	return Log{filepath.Join(workDir, "restore.log"), filepath.Join(dir, id+"-restore.log"), filepath.Join(bundle, SettingsName)}
}

// Remove removes the log of an earlier run, which is not to be quoted for the next.
func (l Log) Remove() error {
	if err := os.RemoveAll(l.Path); err != nil {
		return fmt.Errorf("remove CRIU's old log: %w", err)
	}
	return nil
}

// Explain adds to runc's error the first cause that CRIU's log names, and what to do where that is
// known. It keeps the log.
func (l Log) Explain(err error) error {
	log, lerr := os.Open(l.Path)
	if lerr != nil {
		if strings.Contains(err.Error(), "criu failed") {
			return fmt.Errorf("%w; CRIU left no log, as it does when its configuration has an unknown option: %s", err, l.Settings)
		}
		return err // CRIU never ran; the error says why
	}
	defer log.Close()
	said, means := firstCause(tail(log))
	kept := l.Kept
	if keepLog(tail(log), kept) != nil {
		kept = l.Path
	}
	if means != "" {
		return fmt.Errorf("%s; CRIU said: %s; its log: %s: %w", means, said, kept, err)
	}
	if said != "" {
		return fmt.Errorf("%w; CRIU said: %s; its log: %s", err, said, kept)
	}
	return fmt.Errorf("%w; CRIU's log: %s", err, kept)
}

// maxLog bounds what is read and kept of a log, in bytes: its end, where the errors are. A dump of a
// program with 5,000 threads has a log of 12 MiB.
const maxLog = 16 << 20

// keptLogs bounds the logs that are kept on a node. Names of containers are new with each pod.
const keptLogs = 100

// tail returns the end of a log.
func tail(log *os.File) io.Reader {
	from := int64(0)
	if st, err := log.Stat(); err == nil && st.Size() > maxLog {
		from = st.Size() - maxLog
	}
	return io.NewSectionReader(log, from, maxLog)
}

// keepLog copies a log, and removes the oldest of more than keptLogs.
func keepLog(log io.Reader, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	if err := removeOldLogs(filepath.Dir(to), keptLogs-1); err != nil {
		return err
	}
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, log)
	return errors.Join(err, f.Close())
}

// removeOldLogs removes the oldest logs of dumps and restores but so many.
func removeOldLogs(dir string, keep int) error {
	var logs []os.FileInfo
	for _, kind := range []string{"*-dump.log", "*-restore.log"} {
		names, err := filepath.Glob(filepath.Join(dir, kind))
		if err != nil {
			return err
		}
		for _, name := range names {
			if info, err := os.Lstat(name); err == nil { // or another shim has removed it
				logs = append(logs, info)
			}
		}
	}
	slices.SortFunc(logs, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	for _, info := range logs[min(keep, len(logs)):] {
		if err := os.Remove(filepath.Join(dir, info.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
