// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package oplog is the node's record of operations: one line of JSON for each checkpoint, restore,
// suspend and resume, written by the shims when it is over.
//
// The life of a line: a shim appends it to the file Name; when the file is large it becomes Name.1,
// and the one of that name goes; readers read both, or follow them with a Tail.
package oplog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

const (
	// Name is the file, in the node's directory of logs.
	Name = "operations.jsonl"
	// maxBytes is from which size on a file is put aside.
	maxBytes = 4 << 20
)

// Entry is one operation.
type Entry struct {
	Operation string `json:"operation"` // "checkpoint", "restore", "suspend" or "resume"
	// Namespace and Container name the container, as containerd does.
	Namespace string    `json:"namespace"`
	Container string    `json:"container"`
	Began     time.Time `json:"began"`
	// Took is the whole, in nanoseconds.
	Took   time.Duration  `json:"tookNs"`
	Phases []images.Phase `json:"phases"`
	// Failed is the step that failed, "" if none did; Error what it said. An error without a step is why a
	// container started afresh that would rather have been restored.
	Failed string `json:"failed,omitempty"`
	Error  string `json:"error,omitempty"`
}

// Suspended reports whether the operation has left its container suspended, as a failed resume does.
func (e Entry) Suspended() bool {
	return e.Operation == "suspend" && e.Failed == "" || e.Operation == "resume" && e.Failed != ""
}

// Afresh reports whether the container started from the beginning instead of being restored.
func (e Entry) Afresh() bool { return e.Failed == "" && e.Error != "" }

// Append adds an entry to the log of operations in a directory, which it makes if there is none.
func Append(dir string, e Entry) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write the log of operations: %w", err)
		}
	}()
	e.Error = visible.Text(e.Error)
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := lock(filepath.Join(dir, Name))
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close()) // which unlocks it
}

// lock opens the log of operations for this process alone, after it has put a large one aside.
func lock(name string) (*os.File, error) {
	for {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		var st, now fs.FileInfo
		if err == nil {
			st, err = f.Stat()
		}
		if err == nil {
			now, err = os.Stat(name)
		}
		switch {
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return nil, errors.Join(err, f.Close())
		case err != nil || !os.SameFile(st, now): // another has put it aside meanwhile
		case st.Size() < maxBytes:
			return f, nil
		default:
			if err := os.Rename(name, name+".1"); err != nil {
				return nil, errors.Join(err, f.Close())
			}
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
}

// Read returns the entries of the log of operations in a directory, the oldest first, none if there is none.
func Read(dir string) ([]Entry, error) {
	var all []Entry
	for _, name := range []string{Name + ".1", Name} {
		f, err := os.Open(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the log of operations: %w", err)
		}
		entries, _, err := parse(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, fmt.Errorf("read the log of operations: %w", err)
		}
		all = append(all, entries...)
	}
	return all, nil
}

// parse returns the entries of whole lines, and the number of bytes of these. A line that is none of
// an entry, which a full disk leaves, is passed over.
func parse(r io.Reader) (entries []Entry, n int64, err error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, 0, err
	}
	for {
		line, rest, whole := bytes.Cut(data, []byte("\n"))
		if !whole {
			return entries, n, nil
		}
		var e Entry
		if json.Unmarshal(line, &e) == nil {
			entries = append(entries, e)
		}
		n += int64(len(line)) + 1
		data = rest
	}
}

// Tail follows the log of operations in a directory, from its end on.
type Tail struct {
	dir  string
	file *os.File // that was read last, nil if there was none
}

// NewTail returns a Tail that has read everything.
func NewTail(dir string) (*Tail, error) {
	t := &Tail{dir: dir}
	_, err := t.Next()
	return t, err
}

// Next returns the entries since the last call.
func (t *Tail) Next() (entries []Entry, err error) {
	for {
		now, err := os.Stat(filepath.Join(t.dir, Name))
		if errors.Is(err, fs.ErrNotExist) {
			return entries, nil
		}
		if err != nil {
			return entries, fmt.Errorf("follow the log of operations: %w", err)
		}
		current := true
		if t.file != nil {
			st, err := t.file.Stat()
			if err != nil {
				return entries, fmt.Errorf("follow the log of operations: %w", err)
			}
			current = os.SameFile(st, now)
		}
		if t.file == nil {
			if t.file, err = os.Open(filepath.Join(t.dir, Name)); err != nil {
				return entries, fmt.Errorf("follow the log of operations: %w", err)
			}
		}
		some, err := t.rest()
		entries = append(entries, some...)
		if err != nil || current {
			return entries, err
		}
		// It was put aside, and is read to its end.
		if err := t.Close(); err != nil {
			return entries, err
		}
	}
}

// rest reads the open file on.
func (t *Tail) rest() ([]Entry, error) {
	at, err := t.file.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil, err
	}
	entries, n, err := parse(t.file)
	if err != nil {
		return nil, fmt.Errorf("follow the log of operations: %w", err)
	}
	_, err = t.file.Seek(at+n, io.SeekStart)
	return entries, err
}

// Close closes the file that is open.
func (t *Tail) Close() error {
	if t.file == nil {
		return nil
	}
	err := t.file.Close()
	t.file = nil
	return err
}
