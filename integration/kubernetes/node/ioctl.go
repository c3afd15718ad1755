// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlPointer is ioctl(2) with a C string, which golang.org/x/sys/unix has not.
func ioctlPointer(fd int, request uint, text *byte) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(unsafe.Pointer(text))); errno != 0 {
		return errno
	}
	return nil
}
