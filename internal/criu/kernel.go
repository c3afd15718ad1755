// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"io"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// kernelLog is a descriptor of the kernel's log (/dev/kmsg), from a moment on; -1 where that cannot be read. It alone
// knows the signal that a CRIU was ended by, which is runc's child.
type kernelLog int

func openKernelLog() kernelLog {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	if _, err := unix.Seek(fd, 0, io.SeekEnd); err != nil {
		unix.Close(fd)
		return -1
	}
	return kernelLog(fd)
}

func (k kernelLog) close() {
	if k >= 0 {
		unix.Close(int(k))
	}
}

// maxRecords bounds what is read of the log.
const maxRecords = 10_000

// ofCRIU returns what the kernel has said meanwhile of a CRIU that it has ended, "" for nothing: which CRIU that was it
// does not say. limit reports whether it was for memory.
func (k kernelLog) ofCRIU() (said string, limit bool) {
	record := make([]byte, 8192) // the kernel's own bound for one
	for range maxRecords {
		n, err := unix.Read(int(k), record)
		if errors.Is(err, unix.EPIPE) { // some are lost
			continue
		}
		if err != nil {
			return said, limit
		}
		if text, memory := ofCRIU(string(record[:n])); text != "" {
			said, limit = text, memory
		}
	}
	return said, limit
}

// ofCRIU is that of a record: "6,1234,5678,-;criu[4711]: segfault at 0 …". Programs write records too, with another facility.
func ofCRIU(record string) (said string, limit bool) {
	head, text, _ := strings.Cut(record, ";")
	priority, _, _ := strings.Cut(head, ",")
	if n, err := strconv.Atoi(priority); err != nil || n > 7 {
		return "", false
	}
	text, _, _ = strings.Cut(text, "\n")
	text = text[:min(len(text), quotedBytes)]
	switch {
	case strings.Contains(text, "Killed process") && strings.Contains(text, "(criu)"):
		return text, true
	case strings.Contains(text, "criu["):
		return text, false
	}
	return "", false
}
