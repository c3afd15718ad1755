// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/fault"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// ErrHangs reports a CRIU that neither did its work nor ended in its time.
var ErrHangs = errors.New("CRIU hangs")

// slowest is what CRIU restores in a second at the least, in bytes of images.
const slowest = 32 << 20

// Patience returns how long CRIU may take to restore images of so many bytes: base, and the time
// that a slow disk takes to read them.
func Patience(base time.Duration, bytes uint64) time.Duration {
	return fault.Bound(base + time.Duration(bytes/slowest)*time.Second)
}

// Hangs returns the ErrHangs of a CRIU that had this long.
func Hangs(within time.Duration) error {
	return fmt.Errorf("%w: it has neither restored the processes nor ended in %v: see its log, and raise stall_timeout in %s if it was at work", ErrHangs, within, config.Path)
}

// EndRestoring ends the CRIU that restores the container of this id, and then its runc if that does
// not end by itself: it may be stopped, or wait for a CRIU that cannot be ended.
func EndRestoring(id string) error {
	var err error
	for _, runc := range proc.Children(os.Getpid()) {
		args, _ := proc.Arguments(runc)
		if len(args) == 0 || args[len(args)-1] != id || !slices.Contains(args, "restore") {
			continue
		}
		err = end(proc.Children(runc), forRunc)
		for until := time.Now().Add(fault.Bound(runcEnds)); err == nil && time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
			if status, gone := proc.StatusOf(runc); proc.Ended(gone) || status.Ended() {
				return nil
			}
		}
		_ = proc.Signal(runc, unix.SIGKILL, proc.IsChild) // or it has ended
	}
	return err
}

// runcEnds is how long runc may take to clean up after its CRIU.
const runcEnds = 10 * time.Second
