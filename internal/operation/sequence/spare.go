// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package sequence

import "golang.org/x/sys/unix"

// spareDescriptors is how many file descriptors an operation puts by for its way back. It is more
// than twice what the start of one program takes: both ends of three pipes and of Go's own for an
// error, and /dev/null.
const spareDescriptors = 24

// spare are file descriptors that an operation holds from its first step on, so that its way back
// has some where the process can open no more: without them it could start no program, and the
// container would stay frozen. The zero value holds none.
type spare struct{ fds []int }

// take opens what is missing of the spare descriptors. Where that fails, fewer are held, and there
// is no error: the steps themselves will tell.
func (s *spare) take() {
	for len(s.fds) < spareDescriptors {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return
		}
		s.fds = append(s.fds, fd)
	}
}

// release closes all of them.
func (s *spare) release() {
	for _, fd := range s.fds {
		_ = unix.Close(fd)
	}
	s.fds = nil
}
