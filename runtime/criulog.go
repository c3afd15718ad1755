// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/config"
)

// A criuLog is one of the two logs that CRIU writes.
type criuLog string

const (
	dumpLog    criuLog = "dump"
	restoreLog criuLog = "restore"
)

// quotedErrors is how many of a log's last errors are quoted, and quotedBytes
// bounds each.
const (
	quotedErrors = 3
	quotedBytes  = 300
)

// criuLog is where runc and its shim leave a log that CRIU wrote.
func (c *container) criuLog(kind criuLog) string {
	if kind == restoreLog {
		return filepath.Join(c.workDir, "restore.log")
	}
	return filepath.Join(c.bundle, "criu-dump.log") // copied there after a failure
}

// harmlessError is one that CRIU writes in every run where CAP_SYS_RESOURCE is
// missing, also when all goes well.
const harmlessError = "rlimit: Can't setup RLIMIT_NOFILE"

// withCRIULog adds to an error what CRIU's log says, and keeps the log: runc's
// shim leaves it in the bundle or removes it, and the bundle goes with the
// task. One log of each kind is kept for a container.
func withCRIULog(err error, node config.Node, c *container, kind criuLog) error {
	from := c.criuLog(kind)
	log, rerr := os.Open(from)
	if rerr != nil {
		if strings.Contains(err.Error(), "criu failed") {
			return fmt.Errorf("%w; CRIU left no log, as it does when an option in its configuration is unknown to it: %s",
				err, filepath.Join(c.bundle, criuSettingsName))
		}
		return err // CRIU never ran; the error says why
	}
	defer log.Close()
	kept, kerr := keepLog(log, node.LogDir, fmt.Sprintf("%s-%s-%s.log", c.namespace, c.id, kind))
	if kerr != nil {
		kept = from
	}
	if _, serr := log.Seek(0, io.SeekStart); serr != nil {
		return fmt.Errorf("%w; CRIU's log: %s", err, kept)
	}
	if said := lastErrors(log); len(said) > 0 {
		return fmt.Errorf("%w; CRIU said: %s; its log: %s", err, strings.Join(said, " | "), kept)
	}
	return fmt.Errorf("%w; CRIU's log: %s", err, kept)
}

// keepLog copies a log to dir/name and gives that path.
func keepLog(log io.Reader, dir, name string) (path string, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	path = filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(f, log)
	return path, errors.Join(err, f.Close())
}

// lastErrors gives the last errors in a CRIU log, without time stamps:
// "(00.012345) Error (criu/files.c:123): …".
func lastErrors(log io.Reader) []string {
	var last []string
	lines := bufio.NewReaderSize(log, 64<<10)
	for {
		line, err := lines.ReadString('\n')
		if at := strings.Index(line, "Error ("); at >= 0 && !strings.Contains(line, harmlessError) {
			said := strings.TrimSpace(line[at:])
			last = append(last, said[:min(len(said), quotedBytes)])
			if len(last) > quotedErrors {
				last = last[1:]
			}
		}
		if err != nil {
			return last
		}
	}
}
