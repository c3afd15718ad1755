// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package zdtm

import "github.com/gpuckpt/gpuckpt/integration/beside"

// Exceptions is the list.
var Exceptions = []beside.Exception{
	{Tests: "deleted_dev", Says: "a device that was removed while it is open: close it",
		Why: "CRIU would make the device with the rights of the node"},
	{Tests: "symlink01", Says: "a symbolic link that was removed while it is open: close it",
		Why: "CRIU would make the link, which may lead anywhere, while it restores other files"},
	{Tests: "file_attr", Says: "it was removed while it is open, and is setuid or setgid",
		Why: "CRIU would make a setuid file with the rights of the node"},
	{Tests: "loginuid", Differs: true, Says: "is different after restore",
		Why: "the login uid of the audit log is that of a new process, so that no image chooses it"},
	{Tests: "socket-dump-tcp-close socket-tcp-close0", Differs: true, Says: "Server socket isn't closed",
		Why: "the suite has connections within the container closed, and gpuckpt keeps them"},
	{Tests: "autofs", Says: "is no image that a restore needs",
		Why: "mounts of an automounter, which CRIU connects to its daemon anew"},
	{Tests: "seccomp_strict", Differs: true, Says: "prctl failed (errno = 22",
		Why: "the container has a filter, by which there is no MPTCP, io_uring and Landlock, and with a filter the kernel has no strict mode; dev.gpuckpt.io-uring=allow gives it none"},
	{Tests: "seccomp_filter_threads", Differs: true, Says: "seccomp mode mismatch 2",
		Why: "the container has a filter, so each thread has one"},
	{Tests: "mntns_deleted", Says: "what is mounted there was removed: unmount it",
		Why: "a mount of a directory that is gone"},
}

// hangs are tests at which CRIU, as runc's shim runs it, hangs for ever.
const hangs = " stopped stopped01 stopped02 stopped03 stopped04 stopped12 vdso02 "

// numbered are tests that compare the device number of the root file system. A restore in place mounts it anew, and
// the kernel gives it any free number, with either shim.
const numbered = " file_locks01 unlink_fstat03 "

// sample is what `make test` runs, of tests that need no privileges: those that failed here once, then
// one of each kind.
const sample = `
	chroot chroot-file deleted_dev fd01 file_attr file_lease00 file_lease01 file_locks00 file_locks02 file_locks03
	file_locks06 maps12 sock_opts00 stopped stopped02 symlink01 unlink_fstat041 vdso02 zombie_leader
	aio00 child_opened_proc cow00 cwd01 deleted_unix_sock epoll fifo file_fown fpu00 futex ghost_holes00
	inotify_irmap maps04 memfd02 msgque packet_sock packet_sock_mmap pidfd_self pipe02 posix_timers pthread01 pty03 rseq00 scm06
	seccomp_filter_tsync selfexe00 session01 shm-mp sigpending sk-unix-rel sock_ip_opts00 socket-tcp-fin-wait1 socket_udp timerfd`
