// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package different knows what comes back different from a checkpoint, because CRIU does not carry it and
// nobody brings it back. Kinds is the table of it in docs/limits.md.
//
// Look finds what of it a container has whose dump is made and whose processes still stand still. What is
// found is told to the user, and noted in a file beside CRIU's images, so that the restore tells it again.
package different

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	ipcsem "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-sem"
	ipcshm "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-shm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/tty"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Label is that of an event with what is different, and Separator is between two of that.
const (
	Label     = "different"
	Separator = "; "
)

const (
	mostLines = 32
	longest   = 512
	listen    = 10 // a state of TCP
	// segmentLocked is SHM_LOCKED of linux/shm.h.
	segmentLocked = 0o2000
)

// Kind is one kind of what is different.
type Kind struct {
	// State is what a program has whose test shows it (gpuwork odd).
	State string
	// What a program has set, and what it has After a restore, as docs/limits.md says it.
	What, After string
	found       func(*looked) bool // nil where it cannot be seen from outside, or is so for every program
}

// Kinds is the table.
var Kinds = []Kind{
	{"mapping-policy", "`mbind`", "the default", nil},
	{"lock-future", "`mlockall(MCL_FUTURE)`", "what is locked stays so, new memory is not locked", nil},
	{"lock-when-used", "`MLOCK_ONFAULT`", "all of it is locked", nil},
	{"day-timer", "`timer_settime` with a time of the day (`TIMER_ABSTIME`)", "later by as long as it was down", nil},
	{"queued-udp", "unread UDP datagrams, raw packets", "lost, as in a network", func(l *looked) bool { return l.datagrams }},
	{"queued-sender", "sender of an unread Unix datagram", "none", nil},
	{"raw-address", "`bind` of a raw socket of ICMP, `connect` of a raw or ping socket without a port", "gone", func(l *looked) bool { return l.addresses }},
	{"not-accepted", "TCP connections that are not accepted", "closed", func(l *looked) bool { return l.connections }},
	{"md5", "`TCP_MD5SIG` of a socket that listens", "gone", func(l *looked) bool { return l.keys }},
	{"queued-events", "unread events of inotify", "lost", func(l *looked) bool { return l.events }},
	{"watch-flags", "`IN_ONESHOT`, `IN_EXCL_UNLINK`", "off", func(l *looked) bool { return l.flags }},
	{"both-ways", "a pipe open for both (`<>`)", "for reading", func(l *looked) bool { return l.both }},
	{"undo", "`SEM_UNDO` of a System V semaphore", "not undone", func(l *looked) bool { return l.semaphores }},
	{"locked-segment", "`SHM_LOCK`", "not locked", func(l *looked) bool { return l.locked }},
	{"full-terminal", "unread input of the container's terminal, 16 KB at an end of another", "lost", func(l *looked) bool { return l.typed }},
	{"childs-terminal", "`/dev/tty` where another process leads the session", "none", func(l *looked) bool { return l.terminal }},
	{"exclusive", "`TIOCEXCL`, `TCOOFF`", "off", func(l *looked) bool { return l.exclusive }},
	{"exit-signal", "`clone` with another exit signal", "`SIGCHLD`", func(l *looked) bool { return l.otherEnds }},
	{"shared-mount", "a mount that is shared with the host's (`rshared`, Bidirectional)", "neither sees what the other mounts there", func(l *looked) bool { return l.shared }},
	{"peers-user", "`SO_PEERCRED`, addresses (`getsockname`) of a Unix connection", "root's, and none", nil},
	{"behind-empty", "Unix datagrams behind an empty one", "lost", nil},
	{"nameless", "`O_TMPFILE` without a name", "gets none", nil},
	{"keys", "keys (`add_key`)", "gone", nil},
	{"removed-attributes", "attributes of a removed file (`user.`, ACL)", "gone", nil},
	{"refused-datagram", "unread errors of a socket (`SO_ERROR`, `MSG_ERRQUEUE`)", "none", nil},
	{"netlink-type", "type of a netlink socket", "`SOCK_RAW`", nil},
	{"shared-port", "`SO_ATTACH_REUSEPORT_CBPF`, `_EBPF`", "gone", nil},
	{"urgent", "unread `MSG_OOB` data", "lost, or unmarked", nil},
	{"own-settings", "`PR_SET_MDWE`, `PR_SET_TSC`, `PR_MCE_KILL`, `PR_SET_IO_FLUSHER`, `mseal`, `modify_ldt`, `F_NOTIFY`, `PR_SET_SYSCALL_USER_DISPATCH`, `ARCH_REQ_XCOMP_PERM` (AMX), `ARCH_SET_CPUID`, `pkey_alloc`, `EPIOCSPARAMS`, `PR_THP_DISABLE_EXCEPT_ADVISED`, `PR_FUTEX_HASH`, `sched_runtime`, `F_SET_RW_HINT`, `TCP_FASTOPEN_KEY`, `/proc/PID/autogroup`, `PR_SET_SPECULATION_CTRL`, `sem_otime`, `msg_stime`, `timer_getoverrun` (waiting)", "the default", nil},
	{"landlock", "a Landlock domain, in a container with `dev.gpuckpt.io-uring=allow`", "**gone**: [security.md](security.md#landlock)", nil},
	{"start-time", "start time of a process, by which psutil and Ray know it", "that of the restore", nil},
	{"processor-time", "processor time of a process", "that since the restore", nil},
}

// Row is the kind's line in docs/limits.md.
func (k Kind) Row() string { return fmt.Sprintf("| %s | %s |", k.What, k.After) }

// String says the kind to a user.
func (k Kind) String() string { return strings.ReplaceAll(k.What+": "+k.After, "`", "") }

// looked is what a container has of it.
type looked struct {
	datagrams, connections, keys, events, flags, both, semaphores, locked, exclusive, terminal, typed, otherEnds, addresses, shared bool
}

// Look returns what comes back different of a container, whose first process is given.
func Look(dumped *image.Set, init int, pids func() ([]int, error)) (found []string, err error) {
	var l looked
	sockets, watches := make(map[string]map[string]bool), false // by their tables
	pipes := make(map[uint32]bool)
	err = image.EachOf(dumped, "files.img", func(m *fdinfo.FileEntry) error {
		switch {
		case m.GetIsk() != nil:
			table := tableOf(m.GetIsk())
			l.addresses = l.addresses || unbound(m.GetIsk())
			if sockets[table] == nil {
				sockets[table] = make(map[string]bool)
			}
			sockets[table][strconv.FormatUint(uint64(m.GetIsk().GetIno()), 10)] = true
		case m.GetPipe() != nil && m.GetPipe().GetFlags()&unix.O_WRONLY == 0 && !pipes[m.GetPipe().GetPipeId()]:
			pipes[m.GetPipe().GetPipeId()] = true // the first that reads is what pipe(2) makes, the others are opened
			l.both = l.both || m.GetPipe().GetFlags()&unix.O_RDWR != 0
		case m.GetIfy() != nil:
			watches = true
			for _, w := range m.GetIfy().GetWd() {
				l.flags = l.flags || w.GetMask()&(unix.IN_ONESHOT|unix.IN_EXCL_UNLINK) != 0
			}
		}
		return nil
	})
	for table, of := range sockets {
		found := false
		switch {
		case err != nil || table == "":
		case strings.HasPrefix(table, "tcp"):
			err = l.listeners(init, table, of)
		default:
			found, err = waits(init, table, of)
		}
		l.datagrams = l.datagrams || found
	}
	if err == nil && watches {
		l.events, err = unread(pids)
	}
	if err == nil {
		err = proc.EachStat(pids, func(pid int, f []string) {
			l.terminal = l.terminal || f[7] != "0" && f[6] != strconv.Itoa(pid)
			l.otherEnds = l.otherEnds || f[38] != strconv.Itoa(int(unix.SIGCHLD))
		})
	}
	own := make(map[uint32]bool)     // terminals, by their devices: of these no process has the other end
	masters := make(map[uint32]bool) // other ends, by their numbers
	terr := image.EachOf(dumped, "tty-info*.img", func(m *tty.TtyInfoEntry) error {
		l.exclusive = l.exclusive || m.GetExclusive()
		switch {
		case m.GetType() == tty.TtyType_PTY && unix.Major(uint64(m.GetRdev())) == ptmxMajor:
			masters[m.GetPty().GetIndex()] = true
		case m.GetType() == tty.TtyType_PTY || m.GetType() == tty.TtyType_EXT_TTY:
			own[m.GetRdev()] = true
		}
		return nil
	})
	maps.DeleteFunc(own, func(device uint32, _ bool) bool { return masters[unix.Minor(uint64(device))] })
	if err == nil && len(own) > 0 {
		l.typed, err = typed(init, own)
	}
	serr := image.EachOf(dumped, "ipcns-sem-*.img", func(*ipcsem.IpcSemEntry) error { l.semaphores = true; return nil })
	lerr := image.EachOf(dumped, "ipcns-shm-*.img", func(m *ipcshm.IpcShmEntry) error {
		l.locked = l.locked || m.GetDesc().GetMode()&segmentLocked != 0
		return nil
	})
	merr := image.EachOf(dumped, "mountpoints-*.img", func(m *mnt.MntEntry) error {
		l.shared = l.shared || m.GetSharedId() != 0 && m.GetMasterId() == 0 && (m.GetExtMount() || m.GetExtKey() != "")
		return nil
	})
	if err = errors.Join(err, terr, serr, lerr, merr); err != nil {
		return nil, err
	}
	for _, k := range Kinds {
		if k.found != nil && k.found(&l) {
			found = append(found, k.String())
		}
	}
	return found, nil
}

// tableOf returns the file in /proc/net that a socket is in, in which something may wait; "" for none. To read that
// of TCP takes milliseconds: the kernel goes through the connections of the whole machine. So it is asked otherwise.
func tableOf(s *skinet.InetSkEntry) (table string) {
	switch {
	case s.GetType() == unix.SOCK_RAW:
		table = "raw"
	case s.GetProto() == unix.IPPROTO_UDP:
		table = "udp"
	case s.GetProto() == unix.IPPROTO_TCP && s.GetState() == listen:
		table = "tcp"
	}
	if table != "" && s.GetFamily() == unix.AF_INET6 {
		table += "6"
	}
	return table
}

// unbound reports whether CRIU neither binds nor connects a socket that was (open_inet_sk): it goes by the ports, and
// binds none of ICMP.
func unbound(s *skinet.InetSkEntry) bool {
	set := func(address []uint32) bool {
		return slices.ContainsFunc(address, func(word uint32) bool { return word != 0 })
	}
	icmp := s.GetProto() == unix.IPPROTO_ICMP || s.GetProto() == unix.IPPROTO_ICMPV6
	return icmp && set(s.GetSrcAddr()) || (icmp || s.GetType() == unix.SOCK_RAW) && set(s.GetDstAddr()) && s.GetDstPort() == 0
}

// listeners looks at the sockets that listen, by their table.
func (l *looked) listeners(pid int, table string, sockets map[string]bool) error {
	family := byte(unix.AF_INET)
	if table == "tcp6" {
		family = unix.AF_INET6
	}
	return host.Listeners(fmt.Sprintf("/proc/%d/ns/net", pid), family, func(inode, waiting uint32, keys bool) {
		if sockets[strconv.FormatUint(uint64(inode), 10)] {
			l.connections = l.connections || waiting > 0
			l.keys = l.keys || keys
		}
	})
}

// waits reports whether something waits in one of the sockets, by their table.
func waits(pid int, table string, sockets map[string]bool) (found bool, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/net/%s", pid, table))
	if err != nil {
		return false, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() && !found {
		words := strings.Fields(lines.Text())
		found = len(words) > 9 && sockets[words[9]] && !strings.HasSuffix(words[4], ":00000000")
	}
	return found, lines.Err()
}

// unread reports whether a watch has events that no program has read.
func unread(list func() ([]int, error)) (bool, error) {
	pids, err := list()
	if err != nil {
		return false, err
	}
	for _, pid := range pids {
		files, err := proc.OpenFiles(pid, "anon_inode:inotify")
		if err != nil && !proc.Ended(err) {
			return false, err
		}
		for fd := range files {
			watch, err := proc.CopyOf(pid, fd)
			if err != nil {
				continue // it has ended
			}
			n, err := unix.IoctlGetInt(watch, unix.TIOCINQ)
			unix.Close(watch)
			if err != nil || n > 0 {
				return n > 0, err
			}
		}
	}
	return false, nil
}

// ptmxMajor is that of /dev/ptmx, the other end of each terminal (Linux, Documentation/admin-guide/devices.txt).
const ptmxMajor = 5

// typed reports whether a terminal that a process has open, of these devices, has input that no program has read.
func typed(pid int, devices map[uint32]bool) (found bool, err error) {
	files, err := proc.OpenFiles(pid, "/dev/pts/", "/dev/console")
	if err != nil {
		return false, err
	}
	err = proc.EachCopy(pid, files, func(_, file int) (keep bool) {
		var st unix.Stat_t
		if unix.Fstat(file, &st) == nil && devices[uint32(st.Rdev)] {
			n, _ := unix.IoctlGetInt(file, unix.TIOCINQ)
			found = found || n > 0
		}
		return false
	})
	return found, err
}

// Save writes what was found into the directory of a dump, if there is something.
func Save(dir string, found []string) error {
	if len(found) == 0 {
		return nil
	}
	return os.WriteFile(filepath.Join(dir, image.DifferentName), []byte(strings.Join(found[:min(len(found), mostLines)], "\n")+"\n"), 0o600)
}

// Read reads the file of a dump, if there is one.
func Read(dumped *image.Set) (found []string, err error) {
	return image.ReadText(dumped, image.DifferentName, parse)
}

// plain is a line that can be shown to anybody.
var plain = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[ -~]+$`) })

func parse(r io.Reader) (found []string, err error) {
	err = image.Lines(r, image.DifferentName, longest, func(line string) bool {
		if len(found) == mostLines || !plain().MatchString(line) {
			return false
		}
		found = append(found, line)
		return true
	})
	return found, err
}
