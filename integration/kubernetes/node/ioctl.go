// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// bridgeIoctl makes or removes a bridge of that name: ioctl(2) with a C string,
// which golang.org/x/sys/unix has not.
func bridgeIoctl(fd int, request uint, name string) error {
	text, err := unix.BytePtrFromString(name)
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(unsafe.Pointer(text))); errno != 0 {
		return errno
	}
	return nil
}
