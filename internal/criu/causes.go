// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bufio"
	"cmp"
	"io"
	"slices"
	"strings"
)

// quotedBytes bounds what is quoted of one error.
const quotedBytes = 300

// harmless are errors that CRIU writes when all goes well too: without CAP_SYS_RESOURCE.
var harmless = []string{"rlimit: Can't setup RLIMIT_NOFILE"}

// followers are errors that follow another one and name no cause. CRIU writes some of them when
// runc or a process was killed; then they are all that there is.
var followers = []string{
	"Restoring FAILED", "Dumping FAILED", "Pre-dumping FAILED", "cgroupd: recv req error", "Unable to open fd=", "Killing processes because of failure",
	"Dump files (pid:", "Dump mappings (pid:", "Dump core (pid:", "Collect mappings (pid:", "Can't send response: Broken pipe",
	"Can't read request: Connection reset", "One of more action scripts failed", "script ret code", "Unable to detach", "BUG at",
	"killed by signal 9", "exited, status=", "Unexpected exit code", "Can't collect mappings", "Can't dump mapped file",
}

// A cause is what a known error of CRIU's means.
type cause struct {
	said  []string // all of them are in the error
	means string   // in the field's words, and what to do
}

var causes = []cause{
	{[]string{"bind inet socket", "Address already in use"},
		"a port of the container is taken: end the program that listens on it, or give the container a network of its own"},
	{[]string{"Timeout reached. Try to interrupt"},
		"a thread of the container does not stop within CRIU's timeout: it waits in the kernel, for a child of vfork or a file system, say; try again when it is through"},
	{[]string{"Can't bind packet socket", "No such device"},
		"a packet socket (tcpdump) listens on an interface that is not here: restore it where one has that name, have it listen on all (-i any), or close it before the checkpoint"},
	{[]string{"Can't bind", "Cannot assign requested address"},
		"the container's address is not here: restore it where it has the same address"},
	{[]string{"Can't fork for", "File exists"},
		"a process id of the container is in use: end the container that was checkpointed, or give the container a PID namespace"},
	{[]string{"Can't fork for", "Resource temporarily unavailable"}, noProcess},
	{[]string{"Can't clone helper process", "Resource temporarily unavailable"}, noProcess},
	{[]string{"Can't dump file", "(chr "},
		"a program has a device open that CRIU cannot dump: close it before the checkpoint"},
	{[]string{"Connected TCP socket"},
		"a TCP connection is open: annotation dev.gpuckpt.criu.tcp-established=true dumps it"},
	{[]string{"In-flight connection"},
		"a TCP connection is not accepted yet: remove skip-in-flight = false from [criu.options]"},
	{[]string{"Use link-remap option"},
		"a file was removed while it is open: remove link-remap = false from [criu.options]"},
	{[]string{"Can't link remap to", "Invalid cross-device link"}, covered},
	{[]string{"Open files on overmounted mounts"}, covered},
	{[]string{"Can't link remap to", "Operation not permitted"},
		"a directory of the image was removed or replaced while a program is in it or has it open, which CRIU cannot dump: have the program leave it, or start it anew"},
	{[]string{"Can't link remap to"},
		"a file was removed while it is open, and its directory cannot be written: close the file, or make the directory writable"},
	{[]string{"ghost file", "increase limit"},
		"a file that was removed while it is open is large: annotation dev.gpuckpt.criu.ghost-limit=BYTES raises the limit"},
	{[]string{"mapfile link", "No such device or address"},
		"a program has a file of the kernel mapped, such as io_uring's, which CRIU cannot dump: have it do without (" + withoutIOUring + ")"},
	{[]string{"anon_inode:[io_uring]"},
		"a program uses io_uring, which CRIU cannot dump: have it do without (" + withoutIOUring + ")"},
	{[]string{"has bad size"},
		"a file has changed since the checkpoint: restore it as it was; of a volume, annotation dev.gpuckpt.changed-files=accept takes it as it is"},
	{[]string{"Can't open file", "No such file or directory"},
		"a file that was open is not there: mount the volume that has it, or restore with the container's changed files"},
	{[]string{"Can't lookup mount", "/memfd:"}, hugePages},
	{[]string{"Can't lookup mount", "/anon_hugepage"}, hugePages},
	{[]string{"Can't lookup mount"},
		"a file of the host is open in the container: send its output through the runtime, and mount by the spec"},
	{[]string{"doesn't have a proper root mount"},
		"something is mounted in the container outside of its spec, or a symbolic link that leads to one of the spec's mounts was changed: mount it by the spec, or change the link back"},
	{[]string{"FS mnt", "unsupported id"},
		"a program has a file system mounted that CRIU cannot dump, such as a loop device, hugetlbfs or bpf: unmount it before the checkpoint"},
	{[]string{"Locking network failed"},
		"install nftables, or set network-lock = \"skip\" in [criu.options]"},
	{[]string{"gpuckpt tmpfs", "does not fit"},
		"a tmpfs is smaller than the one that was saved, or memory is short: give both the size that they had"},
	{[]string{"gpuckpt tmpfs", "no space left on device"},
		"the file system of the images is full: make room, or choose another directory"},
	{[]string{"No space left on device"},
		"the file system of the images is full: make room, or choose another directory"},
	{[]string{"remote mmap() failed", "Cannot allocate memory"},
		"a process has as much memory as its own limit allows (ulimit -v or -d), or has locked it, and CRIU needs some more: raise the limit"},
	{[]string{"Cannot allocate memory"},
		"memory is short on the node or in the container: make room, or raise the limit"},
	{[]string{"Error (gpuckpt/sandbox"},
		"CRIU could not enter its sandbox: look for the path, a kernel before 5.12, or a mount that is gone"},
	{[]string{"packetized mode for pipes"},
		"a pipe keeps packets apart (pipe2 with O_DIRECT), which CRIU cannot dump: have the program use a Unix socket (SOCK_SEQPACKET), or close it before the checkpoint"},
	{[]string{"Can't get socket filter len"},
		"a socket has an eBPF filter (SO_ATTACH_BPF), which CRIU cannot dump: have the program detach it, or close the socket, before the checkpoint"},
	{[]string{"Control messages in queue"},
		"a message with its sender's credentials waits in a Unix socket (SO_PASSCRED), which CRIU cannot dump: try again when the program has read it"},
	{[]string{"netlink: The socket has data to read"},
		"a message waits in a netlink socket, which CRIU cannot dump: try again when the program has read it"},
	{[]string{"criu/sk-netlink.c"},
		"a netlink socket is in a group that CRIU cannot restore, of a number above 32 or without an address of its own (bind): close it before the checkpoint"},
	{[]string{"External socket is used"}, socketOutside},
	{[]string{"Unix socket", "without peer"}, socketOutside},
	{[]string{"Unix socket", "with unreachable peer"}, socketOutside},
	{[]string{"half of stream unix connection"}, socketOutside},
	{[]string{"Can't dump that handle"}, watchesNameless},
	{[]string{"Can't find suitable path for handle"}, watchesNameless},
	{[]string{"Dump eventpoll"},
		"an epoll watches a file that its process has closed and another process has open, which CRIU cannot dump: have the program take the file out of the epoll before it closes it"},
	{[]string{"Can't stat path", "File name too long"},
		"a file with a name of more than 245 bytes was removed while it is open, which CRIU cannot dump: close it before the checkpoint"},
	{[]string{"Can't create ghost", "File exists"},
		"a file has the name by which CRIU restores one that was removed while it was open, NAME.cr.N.ghost: remove it, if a restore has left it"},
	{[]string{"skqueue: recvmsg fail", "Connection reset by peer"},
		"a program has closed its end of a Unix connection without reading all, and the other end has not noticed: try again when it has"},
	{[]string{"Can't dump corked dgram socket"},
		"a program holds UDP datagrams back (UDP_CORK), which CRIU cannot dump: try again when they are sent, or have it do without"},
	{[]string{"No NS ID with kid"},
		"a program has a namespace open that no process of the container is in: close it before the checkpoint"},
	{[]string{"task interruption, aborting"},
		"a stopped process has a signal waiting, which CRIU cannot dump: let it continue (kill -CONT), and try again"},
	{[]string{"in victim", "Too many open files"},
		"a process has as many files open as it may, and CRIU needs one more: raise its limit (ulimit -n), or close some"},
	{[]string{"Message reply from daemon is trimmed"},
		"a process has no descriptor left below its limit, and CRIU needs one, or its user has more on their way through sockets than the limit, as while others are restored, or it has ended: raise its limit (ulimit -n), or close files, and try again"},
	{[]string{"POKEDATA failed", "Input/output error"},
		"a program has a device mapped where CRIU puts its code, such as one that uses a GPU for graphics (EGL, OpenGL, Vulkan): end it before the checkpoint"},
	{[]string{"has uprobes vma"},
		"a tracer of the node has put breakpoints into the program (uprobes: bpftrace, a profiler), which CRIU cannot dump, also when the tracer has ended: end it, and start the container anew"},
	{[]string{"has unreachable sharing"},
		"a mount of the container gets mounts of the host (rslave, mountPropagation HostToContainer), which CRIU cannot restore: mount it rprivate (None)"},
	{[]string{"Unsupported proto"},
		"a program has a socket of a protocol that CRIU cannot dump, such as SCTP (132) or DCCP (33): close it before the checkpoint"},
	{[]string{"Unknown socket collected"},
		"a program has a socket of a family that CRIU cannot dump, such as vsock (40) or the kernel's cryptography (38): close it before the checkpoint"},
	{[]string{"Can't open 0/map_files"},
		"a process has unmapped a part of a segment of System V memory (shmat, munmap), which CRIU cannot dump: have it detach the segment (shmdt)"},
	{[]string{"Can't connect inet socket back"},
		"a connection of the container is still open here: end the container that was checkpointed, and try again"},
	{[]string{"SysVIPC shmem map"},
		"a program has shared memory (shmget) of the host's IPC namespace: give the container an IPC namespace of its own"},
	{[]string{"Can't dump nested"}, ownNamespace},
	{[]string{"more than one netns"}, ownNamespace},
	{[]string{"Nested mount namespaces are not supported"}, ownNamespace},
	{[]string{"Unaccessible path opened"},
		"a file was replaced by another one while it is open, or another one is mounted over it: close it before the checkpoint"},
	{[]string{"on an in-flight socket"}, notAccepted},
	{[]string{"closed in-flight socket"}, notAccepted},
	{[]string{"with a pending SIGTRAP"},
		"a thread blocks SIGTRAP and has one waiting, which CRIU cannot dump: have it take the signal before the checkpoint"},
	{[]string{"Can't make", "id for"},
		"a process shares its memory, its working directory or its signal handlers with another process (clone with CLONE_VM, CLONE_FS or CLONE_SIGHAND), which CRIU cannot dump: try again, in case one is starting the other"},
	{[]string{"Unable too cut"},
		"a Unix socket was bound by a name below the working directory, and renamed since, or by one with ..: have the program bind it by its whole path"},
	{[]string{"PIDFD_THREAD"},
		"a program has a pidfd of a thread (PIDFD_THREAD), which CRIU cannot dump: close it before the checkpoint"},
	{[]string{"No CTL for TTY dump"},
		"a terminal is on its way through a socket, which CRIU cannot dump: try again when the program has received it"},
	{[]string{"Unknown clock type"},
		"a program has a timer that wakes the machine (timerfd with CLOCK_BOOTTIME_ALARM, say), which CRIU cannot dump: have it use CLOCK_BOOTTIME"},
	{[]string{"Can't obtain ptmx index"},
		"a program has a terminal open by its name alone (O_PATH), which CRIU cannot dump: close it before the checkpoint"},
	{[]string{"Can't obtain piped data size"},
		"a program has a FIFO open by its name alone (O_PATH), which CRIU cannot dump: close it before the checkpoint"},
	{[]string{"Can't get 1:39 opt"},
		"a program has the name of a Unix socket open (O_PATH), which CRIU cannot dump: close it before the checkpoint"},
	{[]string{"anon_inode:[perf_event]"},
		"a program counts events of the processor or the kernel (perf_event_open), which CRIU cannot dump: end the profiler before the checkpoint"},
	{[]string{"anon_inode:[userfaultfd]"},
		"a program handles its own page faults (userfaultfd), which CRIU cannot dump: have it do without"},
	{[]string{"remote_mprotect failed"},
		"a process has as many mappings of memory as it may, and CRIU needs some more: raise the limit (sysctl vm.max_map_count), or have it map less"},
	{[]string{"mqueue isn't empty"},
		"there is a POSIX message queue, which CRIU cannot dump: remove it before the checkpoint (mq_unlink)"},
	{[]string{"Can't dump file", "of that type"},
		"a program has a file open of a kind that CRIU cannot dump, which the error names: close it before the checkpoint"},
	{[]string{"Don't have tty to inherit"},
		"the container was dumped with a terminal: restore it with one (--tty)"},
}

const (
	socketOutside   = "a program is connected to a Unix socket of a program outside of the container: close the connection before the checkpoint, such as in a hook"
	watchesNameless = "a program watches a file that was removed, or one of /proc, /sys or /dev/pts (inotify, fanotify), or its watches are on their way through a socket: have it end the watch before the checkpoint"
	hugePages       = "a program has huge pages (MAP_HUGETLB, MFD_HUGETLB) that this CRIU cannot dump: close or unmap them before the checkpoint"
	noProcess       = "the container may have no more processes and threads (its pids limit), and a restore takes three more than it has: restore it with a higher limit"
	covered         = "a mount covers a file that a program has open: unmount it, or close the file before the checkpoint"
	notAccepted     = "a program has sent to a Unix socket, or left it, before its connection was accepted: try again when it is accepted"
	ownNamespace    = "a process is in a namespace of its own (unshare, bubblewrap, a service of systemd), which CRIU cannot dump: end it before the checkpoint"
)

// withoutIOUring is how a program comes to do without io_uring.
const withoutIOUring = "remove the annotation dev.gpuckpt.io-uring=allow, or set USE_LIBUV=0 for torch"

// firstCause returns the first error in a log of CRIU's that names a cause, without its time stamp,
// "(00.012345) Error (criu/files.c:123): …", and what it means, "" if that is not known. An error
// whose meaning is known comes before others. Without any it returns the first that names none.
func firstCause(log io.Reader) (said, means string) {
	var other, follower string
	lines := bufio.NewReaderSize(log, 64<<10)
	for {
		line, err := lines.ReadString('\n')
		if at := strings.Index(line, "Error ("); at >= 0 && !hasAny(line, harmless) {
			line = strings.TrimSpace(line[at:])
			quoted := line[:min(len(line), quotedBytes)]
			if !hasAny(line, followers) {
				if known := slices.IndexFunc(causes, func(c cause) bool { return hasAll(line, c.said) }); known >= 0 {
					return quoted, causes[known].means
				}
				other = cmp.Or(other, quoted)
			} else {
				follower = cmp.Or(follower, quoted)
			}
		}
		if err != nil {
			return cmp.Or(other, follower), ""
		}
	}
}

func hasAny(line string, texts []string) bool {
	return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(line, text) })
}

func hasAll(line string, texts []string) bool {
	return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) })
}
