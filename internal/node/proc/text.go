// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/docker/go-units"
)

// A program makes files of /proc as large as it likes: it opens files, watches them, mounts, or names
// any of its memory its environment (prctl(2), PR_SET_MM_MAP). So a text has a bound in bytes, and a
// directory one of entries. An exec takes 6 MiB of arguments and environment at most.
const (
	mostText  = 16 << 20
	mostNames = 1 << 18
)

// ErrTooMuch reports that a process has more of something than is read of any.
var ErrTooMuch = errors.New("more than a checkpoint takes")

// Text reads a file of /proc.
func Text(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := ReadText(f)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return text, nil
}

// ReadText reads a file of /proc that is open.
func ReadText(r io.Reader) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, mostText+1))
	if err == nil && len(text) > mostText {
		return nil, tooLong()
	}
	return text, err
}

// Head reads the begin of a file of /proc, at most a page.
func Head(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, 4096))
}

// Names lists a directory of /proc.
func Names(dir string) ([]string, error) { return namesOf(dir, mostNames) }

// CountFiles returns how many descriptors a process has, and counts no more than most, or a thousand more.
func CountFiles(pid, most int) (n int, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for n <= most {
		names, err := f.Readdirnames(1024)
		n += len(names)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

func namesOf(dir string, most int) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(most + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(names) > most {
		return nil, fmt.Errorf("%s has more than %d entries: %w", dir, most, ErrTooMuch)
	}
	slices.Sort(names)
	return names, nil
}

// Bound counts names of a process that are kept.
type Bound int

// Take counts one more, and refuses more than a text may have.
func (b *Bound) Take(name string) error {
	if *b += Bound(len(name)); *b > mostText {
		return tooLong()
	}
	return nil
}

func tooLong() error {
	return fmt.Errorf("more than %s: %w", units.BytesSize(mostText), ErrTooMuch)
}
