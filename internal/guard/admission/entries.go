// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fown"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fs"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fsnotify"
	ghostfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	ipcshm "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-shm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/ns"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	remapfilepath "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	skpacket "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-packet"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/tty"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// Entries compares the entries of a dump's images with a spec, one after the other.
type Entries struct {
	*allowance
	ids    map[uint32]bool // namespaces of the container
	mounts map[uint32]*mnt.MntEntry
	files  map[uint32]string // names of regular files
	links  map[string]bool   // symbolic links of tmpfs mounts, by their paths in the container
	pids   map[string]bool   // processes of the dump, as the container counts
	opened map[uint32]bool   // files that a process has open
	byName map[uint32]bool   // files that are open by their names alone (O_PATH)
	sent   map[uint32]string // timers, watches, connections and Unix sockets that no process has open, with the other end
	ends   map[string]bool   // of TCP connections and Unix sockets
	sizes  map[uint64]uint64 // of segments of System V memory
	ttys   map[uint32]bool   // numbers of terminals
	free   uint32            // the lowest that is none of them
	open   string            // a path that the spec masks and the dump does not, "" for none
}

// EntriesOf returns what compares the entries of a dump. Check must have accepted the dump.
func EntriesOf(spec *specs.Spec, d *criu.Dump, host Host) *Entries {
	e := &Entries{allowanceOf(spec, host), make(map[uint32]bool), make(map[uint32]*mnt.MntEntry), make(map[uint32]string), make(map[string]bool), make(map[string]bool), make(map[uint32]bool), make(map[uint32]bool), make(map[uint32]string), make(map[string]bool), make(map[uint64]uint64), make(map[uint32]bool), 0, ""}
	if !e.admin() && host.Direct != nil {
		e.open = e.bare(spec.Linux.MaskedPaths, d.Mounts)
	}
	for _, task := range d.Tasks {
		e.pids[strconv.FormatUint(uint64(task.PID), 10)] = true
	}
	for _, id := range namespaceIDs(d.Tasks[0].IDs) {
		e.ids[id] = true
	}
	for _, m := range d.Mounts {
		e.mounts[m.GetMntId()] = m
	}
	return e
}

// Check refuses an entry that asks for more than the spec grants. Entries of files.img must come
// before those of other images that name files, as they do by the order of the images' names. Its
// error names the image, the entry and the rule.
func (e *Entries) Check(i *image.Entry) error {
	rule, err := e.check(i.Message)
	if err != nil && !image.Without(rule) {
		return i.Errorf("%s: %w", rule, err)
	}
	return nil
}

// check returns the name of the rule that it has applied: that of fields.txt.
func (e *Entries) check(m proto.Message) (rule string, err error) {
	switch m := m.(type) {
	case *inventory.InventoryEntry:
		return "lsm", e.lsm(m)
	case *criucore.CoreEntry:
		return e.core(m)
	case *fdinfo.FdinfoEntry:
		e.opened[m.GetId()] = true
		if label := m.GetXattrSecuritySelinux(); label != "" && label != e.spec.Process.SelinuxLabel {
			return "lsm", fmt.Errorf("a file has the SELinux label %q, and the spec %q", label, e.spec.Process.SelinuxLabel)
		}
	case *fdinfo.FileEntry:
		return e.file(m)
	case *ipcshm.IpcShmEntry:
		e.sizes[uint64(m.GetDesc().GetId())] = m.GetSize()
	case *fs.FsEntry:
		if _, ok := e.files[m.GetCwdId()]; !ok {
			return "directories", fmt.Errorf("the working directory is file %d, which there is not", m.GetCwdId())
		}
		if root, ok := e.files[m.GetRootId()]; !ok || root != "/" && !e.has(unix.CAP_SYS_CHROOT) {
			return "directories", fmt.Errorf("the root is file %d, %q, and the spec has no CAP_SYS_CHROOT", m.GetRootId(), root)
		}
	case *mm.MmEntry:
		if _, ok := e.files[m.GetExeFileId()]; !ok {
			return "exe", fmt.Errorf("the program is file %d, which has no name: CRIU does not restore one that was started from memory (memfd_create)", m.GetExeFileId())
		}
		if e.byName[m.GetExeFileId()] {
			return "exe", fmt.Errorf("a program has its own file open by its name alone (O_PATH), %s, and CRIU cannot restore that: close it before the checkpoint", e.files[m.GetExeFileId()])
		}
		return "maps", maps(m, e.sizes)
	case *remapfilepath.RemapFilePathEntry:
		if _, ok := e.files[m.GetOrigId()]; !ok {
			return "removed files", fmt.Errorf("file %d is removed, and there is none", m.GetOrigId())
		}
		if _, ok := e.files[m.GetRemapId()]; !ok && m.GetRemapType() == remapfilepath.RemapType_LINKED {
			return "removed files", fmt.Errorf("file %d has another name, that of file %d, which there is not", m.GetOrigId(), m.GetRemapId())
		}
	case *ghostfile.GhostFileEntry:
		return "removed files", ghost(m)
	case *tty.TtyInfoEntry:
		return "terminals", e.terminal(m)
	case *skpacket.SkPacketEntry:
		return "files", e.onTheirWay(m)
	}
	return "", nil
}

// onTheirWay refuses a file in a socket's queue, which no inspection sees, where CRIU opens files before all
// is masked, and what CRIU sets up by the descriptor of a process, which it has none of then. A connection to
// elsewhere comes back closed, which needs none.
func (e *Entries) onTheirWay(p *skpacket.SkPacketEntry) error {
	for _, scm := range p.GetScm() {
		for _, id := range scm.GetRights() {
			if end, ok := e.sent[id]; ok && (end == "" || e.ends[end] != strings.HasPrefix(end, "unix")) {
				return errors.New("a timer (timerfd), a watch (inotify), a TCP connection of the container or a Unix socket without another end is on its way through a socket, and CRIU cannot restore one that no process has open: try again when the program has received it")
			}
			if name, ok := e.files[id]; ok && e.open != "" {
				return fmt.Errorf("%s is on its way through a socket, and %s is not masked in the dump, as the spec has it: have the program receive the file first", name, e.open)
			}
		}
	}
	return nil
}

// lsm refuses images of a machine without the security module that the spec relies on: CRIU would
// set no profile at all.
func (e *Entries) lsm(m *inventory.InventoryEntry) error {
	if p := e.spec.Process; p.ApparmorProfile != "" && m.GetLsmtype() != inventory.Lsmtype_APPARMOR ||
		p.SelinuxLabel != "" && m.GetLsmtype() != inventory.Lsmtype_SELINUX {
		return fmt.Errorf("it was made with %s, and the spec has the AppArmor profile %q and the SELinux label %q", m.GetLsmtype(), p.ApparmorProfile, p.SelinuxLabel)
	}
	return nil
}

func (e *Entries) core(m *criucore.CoreEntry) (string, error) {
	for _, t := range m.GetTc().GetTimers().GetPosix() {
		wakes := t.GetClockId() == unix.CLOCK_REALTIME_ALARM || t.GetClockId() == unix.CLOCK_BOOTTIME_ALARM // the machine
		if wakes && !e.has(unix.CAP_WAKE_ALARM) {
			return "timers", fmt.Errorf("a timer has the clock %d, and the spec no CAP_WAKE_ALARM", t.GetClockId())
		}
	}
	// A spec's own score is set after the restore, if it is higher.
	if score := m.GetTc().GetOomScoreAdj(); score < 0 && e.spec.Process.OOMScoreAdj == nil && int(score) < e.host.OOMScore && !e.has(unix.CAP_SYS_RESOURCE) {
		return "oom score", fmt.Errorf("oom_score_adj is %d, and a new container's %d", score, e.host.OOMScore)
	}
	const pending = 11 // RLIMIT_SIGPENDING
	if limits := m.GetTc().GetRlimits().GetRlimits(); len(limits) > pending && !image.Without("limits") {
		// For lack of room the kernel refuses timers, and of signals real-time ones alone.
		waiting := uint64(len(m.GetTc().GetTimers().GetPosix()))
		for _, s := range slices.Concat(m.GetTc().GetSignalsS().GetSignals(), m.GetThreadCore().GetSignalsP().GetSignals()) {
			if info := s.GetSiginfo(); len(info) >= 4 && binary.NativeEndian.Uint32(info) >= 32 {
				waiting++
			}
		}
		if most := limits[pending].GetCur(); waiting > most {
			return "limits", fmt.Errorf("a process has %d timers and waiting signals, and may have %d (ulimit -i), and CRIU restores no more: try again when it has taken them, or raise the limit", waiting, most)
		}
	}
	if label := m.GetThreadCore().GetCreds().GetLsmSockcreate(); label != "" && label != e.spec.Process.SelinuxLabel {
		return "lsm", fmt.Errorf("its sockets have the SELinux label %q, and the spec %q", label, e.spec.Process.SelinuxLabel)
	}
	return "", nil
}

// file compares one open or mapped file.
func (e *Entries) file(m *fdinfo.FileEntry) (string, error) {
	kinds := 0
	var err error
	rule := "owners"
	m.ProtoReflect().Range(messages(func(part proto.Message) {
		kinds++
		if o, ok := part.(interface{ GetFown() *fown.FownEntry }); ok && err == nil {
			err = e.owner(o.GetFown())
		}
	}))
	if err != nil {
		return rule, err
	}
	// CRIU believes the type, and looks for the message of it.
	if want := messageOf[m.GetType()]; kinds != 1 || want == "" || !m.ProtoReflect().Has(m.ProtoReflect().Descriptor().Fields().ByName(want)) {
		return "files", fmt.Errorf("it has the type %v, and not what describes a file of this type alone", m.GetType())
	}
	to := ""
	if s := m.GetIsk(); s.GetProto() == unix.IPPROTO_TCP && s.GetType() != unix.SOCK_RAW && s.GetState() != unix.BPF_TCP_CLOSE && s.GetState() != unix.BPF_TCP_LISTEN {
		e.ends[fmt.Sprint(s.SrcAddr, s.GetSrcPort(), s.DstAddr, s.GetDstPort())] = true
		to = fmt.Sprint(s.DstAddr, s.GetDstPort(), s.SrcAddr, s.GetSrcPort())
	}
	if s := m.GetUsk(); s != nil && (s.GetType() == unix.SOCK_DGRAM || s.GetState() == unix.BPF_TCP_ESTABLISHED) {
		e.ends[fmt.Sprint("unix ", s.GetPeer())] = true
		to = fmt.Sprint("unix ", s.GetIno())
	}
	if (m.GetTfd() != nil || m.GetIfy() != nil || to != "") && !e.opened[m.GetId()] {
		e.sent[m.GetId()] = to
	}
	switch {
	case m.GetReg() != nil:
		return "files", e.regular(m.GetReg())
	case m.GetIsk() != nil:
		return "sockets", e.inet(m.GetIsk())
	case m.GetUsk() != nil:
		return "sockets", e.unix(m.GetUsk())
	case m.GetPsk() != nil:
		return "sockets", e.packet(m.GetPsk())
	case m.GetNlsk() != nil:
		return "sockets", e.netlink(m.GetNlsk())
	case m.GetNsf() != nil:
		return "namespace files", e.namespaceFile(m.GetNsf())
	case m.GetIfy() != nil:
		return "inotify", e.inotify(m.GetIfy())
	case m.GetFifo() != nil && m.GetFifo().RegfId != nil:
		if _, ok := e.files[m.GetFifo().GetRegfId()]; !ok {
			return "files", fmt.Errorf("a FIFO is file %d, which there is not", m.GetFifo().GetRegfId())
		}
	case m.GetTty() != nil:
		if name, ok := e.files[m.GetTty().GetRegfId()]; m.GetTty().RegfId != nil && (!ok || !strings.HasPrefix(name, "/dev/")) {
			return "terminals", fmt.Errorf("a terminal is file %d, %q, which is none", m.GetTty().GetRegfId(), name)
		}
		return "terminals", openFlags(m.GetTty().GetFlags())
	}
	return "", nil
}

// messageOf are the fields that describe files, by the files' types.
var messageOf = map[fdinfo.FdTypes]protoreflect.Name{
	fdinfo.FdTypes_REG: "reg", fdinfo.FdTypes_PIPE: "pipe", fdinfo.FdTypes_FIFO: "fifo", fdinfo.FdTypes_INETSK: "isk", fdinfo.FdTypes_UNIXSK: "usk", fdinfo.FdTypes_NETLINKSK: "nlsk", fdinfo.FdTypes_PACKETSK: "psk",
	fdinfo.FdTypes_EVENTFD: "efd", fdinfo.FdTypes_EVENTPOLL: "epfd", fdinfo.FdTypes_INOTIFY: "ify", fdinfo.FdTypes_SIGNALFD: "sgfd", fdinfo.FdTypes_TTY: "tty",
	fdinfo.FdTypes_NS: "nsf", fdinfo.FdTypes_EXT: "ext", fdinfo.FdTypes_TIMERFD: "tfd", fdinfo.FdTypes_MEMFD: "memfd", fdinfo.FdTypes_PIDFD: "pidfd",
}

// fileFlags are what a descriptor can have (F_GETFL), and no flag that makes or cuts a file; tmpFile is
// the one of unnamed files (O_TMPFILE), which CRIU takes off and opens as removed ones.
const fileFlags = unix.O_ACCMODE | unix.O_APPEND | unix.O_NONBLOCK | unix.O_DSYNC | unix.O_SYNC | unix.O_ASYNC | unix.O_DIRECT | 0o100000 |
	unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NOATIME | unix.O_PATH | unix.O_CLOEXEC
const tmpFile = unix.O_TMPFILE &^ unix.O_DIRECTORY

func openFlags(flags uint32) error {
	if more := flags &^ uint32(fileFlags); more != 0 {
		return fmt.Errorf("it has the flags %#o, which no open file has", more)
	}
	return nil
}

// regular compares a file that is opened by its name. CRIU opens it as root.
func (e *Entries) regular(r *regfile.RegFileEntry) error {
	name := r.GetName()
	if _, twice := e.files[r.GetId()]; twice {
		return fmt.Errorf("file %d is there twice", r.GetId())
	}
	e.files[r.GetId()], e.byName[r.GetId()] = name, r.GetFlags()&unix.O_PATH != 0
	if err := cleanPath(name); err != nil {
		return err
	}
	if err := openFlags(r.GetFlags() &^ tmpFile); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	m := e.mounts[uint32(r.GetMntId())]
	if r.GetMntId() == noMount {
		m = e.mountOf(name)
	}
	if m == nil {
		return fmt.Errorf("%s is on mount %d, which there is not", name, r.GetMntId())
	}
	at := path.Clean("/" + m.GetMountpoint())
	if name != at && at != "/" && !strings.HasPrefix(name, at+"/") {
		return fmt.Errorf("%s is not on the mount %s", name, at)
	}
	if kernels(m) {
		if err := e.kernelFile(strings.TrimPrefix(name, at), r.GetFlags(), isExternal(m)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for end := strings.LastIndexByte(name, '/'); end > 0; end = strings.LastIndexByte(name[:end], '/') { // clean, and maybe long
		if e.links[name[:end]] {
			return fmt.Errorf("%s: there is a symbolic link on the way to it, %s; close it before the checkpoint", name, name[:end])
		}
	}
	if e.host.Direct != nil {
		if err := e.host.Direct(name); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// noMount is the mount of a file that CRIU has given another name while it dumped (link_remap.N): CRIU
// restores it by its path alone (files-reg.c, dump_linked_remap).
const noMount = -1

// mountOf returns the mount that a path is on: the last one with the longest place that leads to it.
func (e *Entries) mountOf(name string) (found *mnt.MntEntry) {
	longest := -1
	for _, m := range e.mounts {
		at := path.Clean("/" + m.GetMountpoint())
		if (name == at || at == "/" || strings.HasPrefix(name, at+"/")) && len(at) >= longest {
			found, longest = m, len(at)
		}
	}
	return found
}

// runcNodes are the device nodes that runc gives every container.
var runcNodes = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/console", "/dev/ptmx"}

// Content compares a name in the content of a tmpfs: its path in the container, its mode, as in
// struct stat, and its owner. It must be called for all names before Check.
func (e *Entries) Content(name string, mode, uid, gid uint32) error {
	switch mode & unix.S_IFMT {
	case unix.S_IFLNK:
		e.links[name] = true
	case unix.S_IFCHR, unix.S_IFBLK:
		known := slices.Contains(runcNodes, name) || cdi.IsNode(name) || e.device(name)
		if !known && !e.has(unix.CAP_MKNOD) {
			return fmt.Errorf("content of tmpfs: %s is a device, and the spec has neither it nor CAP_MKNOD", name)
		}
	case unix.S_IFREG:
		user, may := e.spec.Process.User, e.attainable()
		if mode&unix.S_ISUID != 0 && uid != user.UID && may&(1<<unix.CAP_SETUID) == 0 ||
			mode&unix.S_ISGID != 0 && gid != user.GID && may&(1<<unix.CAP_SETGID) == 0 {
			return fmt.Errorf("content of tmpfs: %s runs as user %d and group %d (mode %#o), and the spec has neither CAP_SETUID nor CAP_SETGID", name, uid, gid, mode)
		}
	}
	return nil
}

// cleanPath refuses a path that leads elsewhere than it says.
func cleanPath(name string) error {
	if !path.IsAbs(name) || path.Clean(name) != name {
		return fmt.Errorf("%q is not an absolute, clean path", name)
	}
	return nil
}

// kernels reports whether the files of a mount are the kernel's.
func kernels(m *mnt.MntEntry) bool {
	switch mnt.Fstype(m.GetFstype()) {
	case mnt.Fstype_PROC, mnt.Fstype_SYSFS, mnt.Fstype_CGROUP, mnt.Fstype_CGROUP2, mnt.Fstype_SECURITYFS, mnt.Fstype_DEBUGFS, mnt.Fstype_TRACEFS, mnt.Fstype_BINFMT_MISC:
		return true
	}
	return false
}

// magicLinks are files of /proc that lead out of it, whatever they are called there, and memory.
var magicLinks = []string{"fd", "cwd", "root", "exe", "map_files", "ns", "mem"}

// ofProcess matches directories of magic links below /proc, and memory.
var ofProcess = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^/([0-9]+)(/task/[0-9]+)?/(fd|map_files|ns|mem)$`) })

// writable matches what a process may write to of its own, or of another one of the container's: the kernel
// asks for the rights of who writes, not of who has opened it. Who writes to "sched" has the kernel count anew.
var writable = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^/([0-9]+)(/task/[0-9]+)?/(attr/[a-z/]+|autogroup|clear_refs|comm|coredump_filter|oom_adj|oom_score_adj|sched|timerslack_ns)$`)
})

// ofThread matches what a thread has in /proc. When CRIU opens files, there are first threads alone.
var ofThread = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^/([0-9]+)/task/([0-9]+)(/|$)`) })

// kernelFile refuses files of proc, sysfs and cgroups that lead elsewhere, or are open for writing:
// a process that may write to them opens them again, but for writable ones. A directory of links of the container's own
// processes is none: who has it open sees their numbers, and the kernel asks for the rights of who follows
// a link (proc_pid_get_link). Their memory is none either: it is what the dump says. In a mount from outside
// the numbers are those of other processes.
func (e *Entries) kernelFile(name string, flags uint32, outside bool) error {
	if at := ofThread().FindStringSubmatch(name); at != nil && e.pids[at[1]] && at[1] != at[2] && !outside {
		return errors.New("it is of a thread that is not the first one of its process, and CRIU cannot restore that: close it before the checkpoint")
	}
	if e.has(unix.CAP_SYS_ADMIN) {
		return nil
	}
	if at := ofProcess().FindStringSubmatch(name); at != nil && e.pids[at[1]] && !outside {
		if at[3] == "mem" {
			return nil
		}
		name = ""
	}
	for part := range strings.SplitSeq(name, "/") {
		if slices.Contains(magicLinks, part) {
			return fmt.Errorf("it leads to what another process has (%s)", part)
		}
	}
	if at := writable().FindStringSubmatch(name); at != nil && e.pids[at[1]] && !outside {
		return nil
	}
	if flags&unix.O_ACCMODE != unix.O_RDONLY {
		return errors.New("a file of the kernel is open for writing, and the spec has no CAP_SYS_ADMIN: close it before the checkpoint")
	}
	return nil
}

// owner compares whom the kernel signals for a file, and in whose name.
func (e *Entries) owner(f *fown.FownEntry) error {
	const thread = 0 // F_OWNER_TID
	if f.GetPidType() == thread && f.GetPid() != 0 && !e.pids[strconv.FormatUint(uint64(f.GetPid()), 10)] {
		return errors.New("the kernel signals a thread for an open file (F_SETOWN_EX), which is not the first one of its process, and CRIU cannot restore that: have the program name the process")
	}
	if f.GetPid() == 0 || e.attainable()&(1<<unix.CAP_SETUID) != 0 {
		return nil
	}
	for _, uid := range []uint32{f.GetUid(), f.GetEuid()} {
		if uid != e.spec.Process.User.UID {
			return fmt.Errorf("it signals in the name of user %d, and the spec has %d without CAP_SETUID", uid, e.spec.Process.User.UID)
		}
	}
	return nil
}

// namespaceFile refuses the file of a namespace that is not the container's: the host's, by its
// number.
func (e *Entries) namespaceFile(f *ns.NsFileEntry) error {
	if !e.ids[f.GetNsId()] {
		return fmt.Errorf("namespace %d is none of the container's", f.GetNsId())
	}
	return nil
}

// maxHandle is how many words of a file's handle CRIU has room for.
const maxHandle = 16

// inotify refuses watches by handle, which reach any file of a file system, and long handles.
func (e *Entries) inotify(f *fsnotify.InotifyFileEntry) error {
	for _, w := range f.GetWd() {
		h := w.GetFHandle()
		switch {
		case len(h.GetHandle()) > maxHandle || int(h.GetBytes()) > 8*len(h.GetHandle()):
			return fmt.Errorf("a handle has %d words and %d bytes", len(h.GetHandle()), h.GetBytes())
		case h.Path == nil && !e.has(unix.CAP_DAC_READ_SEARCH):
			return errors.New("a watch is by handle (inotify), since its file has no name in the container, and the spec has no CAP_DAC_READ_SEARCH: have the program end the watch before the checkpoint")
		case leadsOut(h.GetPath()):
			return fmt.Errorf("a watch is of %q", h.GetPath())
		case h.MntId != nil && e.mounts[h.GetMntId()] == nil:
			return fmt.Errorf("a watch is on mount %d, which there is not", h.GetMntId())
		}
	}
	return nil
}

// terminal refuses terminals that are not pseudo terminals, and those with numbers that CRIU does not get. The kernel
// gives out the lowest free number, and CRIU opens at most 32 terminals to reach one.
func (e *Entries) terminal(t *tty.TtyInfoEntry) error {
	const master, most = 5<<8 | 2, 32
	if n := t.GetPty().GetIndex(); t.GetRdev() == master {
		if n >= e.free+most {
			return fmt.Errorf("a program has the terminal %d open, and %d is free: CRIU restores none that is so far above; close it before the checkpoint, or start the program anew", n, e.free)
		}
		for e.ttys[n] = true; e.ttys[e.free]; e.free++ {
		}
	}
	major := unix.Major(uint64(t.GetRdev()))
	if major >= 136 && major <= 143 || major == 5 {
		return nil
	}
	return fmt.Errorf("terminal %d is a device of the major %d, and no pseudo terminal", t.GetId(), major)
}

// ghost refuses a removed file that could do more than hold content.
func ghost(g *ghostfile.GhostFileEntry) error {
	switch mode := g.GetMode(); mode & unix.S_IFMT {
	case unix.S_IFREG:
		if mode&(unix.S_ISUID|unix.S_ISGID) != 0 {
			return fmt.Errorf("it was removed while it is open, and is setuid or setgid (mode %#o): close it", mode)
		}
	case unix.S_IFDIR, unix.S_IFIFO, unix.S_IFSOCK:
	default:
		return fmt.Errorf("it is a device or a link (mode %#o)", mode)
	}
	return nil
}

// Addresses of a program, and the one page that the kernel has above them (vsyscall).
const (
	pageSize     = 4096
	addressEnd   = 1 << 56
	vsyscallPage = 0xffffffffff600000
	// mostPrivate is what lies below programs, where CRIU has room for all private mappings in a row
	// (ELF_ET_DYN_BASE of x86-64).
	mostPrivate = 1 << 47 / 3 * 2
)

// What a mapping can be (criu/include/image.h).
const (
	mapStatus = 0xffff&^0x10 | 1<<27 | 1<<28 | 1<<29
	mapSysV   = 1 << 10
	mapGuard  = 1 << 16 // no mapping, but pages of mappings that madvise(2) has made guards (MADV_GUARD_INSTALL)
)

var errPart = errors.New("a process has unmapped a part of a segment of System V memory (shmat, munmap), and CRIU restores whole ones: have it detach the segment (shmdt)")

// maps refuses mappings that overlap: CRIU's own code lies where the images leave room, and works
// as root until it is done. Guards come behind all mappings, and lie within them. It refuses System V memory of which a
// process has a part: CRIU attaches a segment whole. sizes are those of segments.
func maps(m *mm.MmEntry, sizes map[uint64]uint64) error {
	end, private := uint64(0), uint64(0)
	type attached struct{ segment, at uint64 }
	segments := make(map[attached]uint64) // how far they are mapped
	var mapped [][2]uint64                // from and to; neighbours as one
	for i, v := range m.GetVmas() {
		from, to := v.GetStart(), v.GetEnd()
		pages := from < to && to <= addressEnd && from%pageSize == 0 && to%pageSize == 0
		switch {
		case v.GetStatus() == mapGuard:
			if !pages || !slices.ContainsFunc(mapped, func(in [2]uint64) bool { return in[0] <= from && to <= in[1] }) {
				return fmt.Errorf("guard %d from %#x to %#x is in no mapping before it, or is no range of pages", i, from, to)
			}
			end = addressEnd
			continue
		case v.GetStatus()&^mapStatus != 0:
			return fmt.Errorf("mapping %d at %#x is of an unknown kind (%#x)", i, from, v.GetStatus())
		case from == vsyscallPage && to == vsyscallPage+pageSize:
		case from < end || !pages:
			return fmt.Errorf("mapping %d from %#x to %#x overlaps the one before, or is no range of pages", i, from, to)
		}
		if v.GetStatus()&mapSysV != 0 {
			a := attached{v.GetShmid(), from - v.GetPgoff()}
			if segments[a] != v.GetPgoff() {
				return errPart
			}
			segments[a] += to - from
		}
		if err := openFlags(v.GetFdflags() &^ tmpFile); err != nil {
			return fmt.Errorf("mapping %d: %w", i, err)
		}
		if last := len(mapped) - 1; last >= 0 && from == end {
			mapped[last][1] = to
		} else {
			mapped = append(mapped, [2]uint64{from, to})
		}
		end = to
		if v.GetFlags()&unix.MAP_PRIVATE != 0 {
			private += to - from
		}
	}
	for a, mapped := range segments {
		if size, known := sizes[a.segment]; known && mapped < size {
			return errPart
		}
	}
	if private > mostPrivate {
		return fmt.Errorf("it has %d TiB mapped, and CRIU has room for %d: a sanitizer (-fsanitize=thread) reserves so much, have the program do without", private>>40, uint64(mostPrivate)>>40)
	}
	return nil
}
