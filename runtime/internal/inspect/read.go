// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// System is where Check reads what the kernel says. Tests have a /proc of their own.
type System struct {
	// Proc is where /proc is mounted.
	Proc string
	// Status returns the status of the file that a path of /proc leads to, without opening it.
	Status func(path string) (unix.Statx_t, error)
	// Policy returns the scheduling policy of a thread, and its real-time priority.
	Policy func(tid int) (policy, priority uint32, err error)
	// Mounts returns the mountinfo of the mount namespace of a process. The process's own lacks what is
	// not below its root.
	Mounts func(pid int) ([]byte, error)
	// Internal returns the ids of the kernel's own mounts, which the files of shared memory are on.
	Internal func() (map[uint64]bool, error)
}

// Kernel is the running kernel.
func Kernel() System {
	return System{Proc: "/proc", Status: statx, Policy: policy, Mounts: mountsOf, Internal: internalMounts}
}

func statx(path string) (st unix.Statx_t, err error) {
	// A file system that does not answer is not asked.
	err = unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE|unix.STATX_INO|unix.STATX_MNT_ID, &st)
	if err == nil && st.Mask&unix.STATX_MNT_ID == 0 {
		err = errors.New("the kernel does not name the mount of a file: it must be 5.8 or newer")
	}
	return st, err
}

func mountsOf(pid int) (text []byte, err error) {
	root, err := os.OpenRoot("/proc") // the container's may be another
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return text, host.InMountNamespace(pid, func() (err error) {
		f, err := root.Open(fmt.Sprintf("%d/task/%d/mountinfo", os.Getpid(), unix.Gettid()))
		if err != nil {
			return err
		}
		defer f.Close()
		text, err = proc.ReadText(f)
		return err
	})
}

func policy(tid int) (policy, priority uint32, err error) {
	attr, err := unix.SchedGetAttr(tid, 0)
	if err != nil {
		return 0, 0, err
	}
	return attr.Policy, attr.Priority, nil
}

// internalMounts finds the mounts by files on them: of memory, and of huge pages of each size.
func internalMounts() (map[uint64]bool, error) {
	ids := make(map[uint64]bool)
	const sizeShift = 26 // MFD_HUGE_SHIFT
	for _, flags := range []int{0, unix.MFD_HUGETLB | 21<<sizeShift, unix.MFD_HUGETLB | 30<<sizeShift} {
		fd, err := unix.MemfdCreate("gpuckpt", flags|unix.MFD_CLOEXEC)
		if err != nil && flags != 0 {
			continue // a size that this kernel does not have
		}
		if err != nil {
			return nil, err
		}
		st, err := statx(fmt.Sprintf("/proc/self/fd/%d", fd))
		unix.Close(fd)
		if err != nil {
			return nil, err
		}
		ids[st.Mnt_id] = true
	}
	return ids, nil
}

// process is what /proc has of a process.
type process struct {
	pid            int
	name           string
	ended          bool
	threads        []thread
	namespaces     map[string]string // "mnt:[4026531841]" by "mnt"
	uidMap, gidMap []specs.LinuxIDMapping
	cgroups        map[string]string // by controller
	limits         map[string]uint64 // hard ones, by the spec's names
	root, cwd, exe file
	files          []file
	mapped         []file
	rawSockets     map[string]bool // by inode
}

type thread struct {
	tid                                                  int
	uids, gids, groups                                   []uint32
	bounding, permitted, effective, inheritable, ambient uint64
	noNewPrivileges                                      bool
	seccomp                                              int
	policy, priority                                     uint32
	label                                                string // AppArmor's or SELinux's
}

// file is a file that a process has.
type file struct {
	name     string // what it is to the process: "file 3"
	link     string
	mount    uint64
	device   uint64 // of a device node
	block    bool
	writable bool
}

// named reports whether a file lies in a file system: pipes, sockets and the like do not.
func (f file) named() bool { return strings.HasPrefix(f.link, "/") }

// mount is a line of mountinfo.
type mount struct {
	id                  uint64
	device, root, point string
	kind                string
	options, super      []string
	group               string // of mounts that are shared, "" for none
}

func (m mount) is(option string) bool {
	return slices.Contains(m.options, option) || option == "ro" && slices.Contains(m.super, option)
}

// hostView is what the shim's own process sees.
type hostView struct {
	namespaces map[string]string
	mounts     []mount
	devices    map[string]bool // of the mounts, and of CRIU's
	internal   map[uint64]bool
}

func (s System) readHost(criu int) (*hostView, error) {
	h := &hostView{devices: make(map[string]bool)}
	var err error
	if h.namespaces, err = s.readNamespaces("self"); err != nil {
		return nil, err
	}
	if h.mounts, err = s.readMounts("self"); err != nil {
		return nil, err
	}
	all := h.mounts
	if criu != 0 {
		more, err := s.readMounts(strconv.Itoa(criu))
		if err != nil {
			return nil, err
		}
		all = slices.Concat(all, more)
	}
	for _, m := range all {
		h.devices[m.device] = true
	}
	h.internal, err = s.Internal()
	return h, err
}

// Namespace returns the name of the namespace of a kind that a path leads to, as /proc/PID/ns has
// it; "" if there is none.
func (s System) Namespace(kind, path string) string {
	if path == "" {
		return ""
	}
	if text, err := os.Readlink(path); err == nil && strings.HasPrefix(text, kind+":[") {
		return text
	}
	st, err := s.Status(path) // a file that the namespace is mounted on
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%s:[%d]", kind, st.Ino)
}

func (s System) read(pid int) (*process, error) {
	dir := strconv.Itoa(pid)
	status, err := s.text(dir, "status")
	if err != nil {
		return nil, err
	}
	p := &process{pid: pid, name: proc.Status(status).Field("Name")}
	if p.ended = proc.Status(status).Ended(); p.ended {
		return p, nil
	}
	for _, read := range []func(string, *process) error{s.readThreads, s.readKernel, s.readFiles, s.readMapped, s.readSockets} {
		if err := read(dir, p); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (s System) text(parts ...string) ([]byte, error) {
	return proc.Text(filepath.Join(append([]string{s.Proc}, parts...)...))
}

func (s System) readThreads(dir string, p *process) error {
	tids, err := proc.Names(filepath.Join(s.Proc, dir, "task"))
	if err != nil {
		return err
	}
	for _, name := range tids {
		tid, err := strconv.Atoi(name)
		if err != nil {
			return err
		}
		text, err := s.text(dir, "task", name, "status")
		if err != nil {
			return err
		}
		status := proc.Status(text)
		if status.Ended() {
			continue
		}
		t := thread{tid: tid, noNewPrivileges: status.Number("NoNewPrivs") != 0, seccomp: status.Number("Seccomp")}
		for name, set := range map[string]*uint64{"CapBnd": &t.bounding, "CapPrm": &t.permitted, "CapEff": &t.effective, "CapInh": &t.inheritable, "CapAmb": &t.ambient} {
			if *set, err = strconv.ParseUint(status.Field(name), 16, 64); err != nil {
				return fmt.Errorf("thread %d: %s: %w", tid, name, err)
			}
		}
		for name, ids := range map[string]*[]uint32{"Uid": &t.uids, "Gid": &t.gids, "Groups": &t.groups} {
			for word := range strings.FieldsSeq(status.Field(name)) {
				id, err := strconv.ParseUint(word, 10, 32)
				if err != nil {
					return fmt.Errorf("thread %d: %s: %w", tid, name, err)
				}
				*ids = append(*ids, uint32(id))
			}
		}
		if t.policy, t.priority, err = s.Policy(tid); err != nil {
			return fmt.Errorf("thread %d: scheduling: %w", tid, err)
		}
		if label, err := s.text(dir, "task", name, "attr/current"); err == nil { // else the kernel has no such module
			t.label, _, _ = strings.Cut(strings.TrimRight(string(label), "\n\x00"), " (")
		}
		p.threads = append(p.threads, t)
	}
	return nil
}

// limitNames are the lines of /proc/PID/limits.
var limitNames = map[string]string{
	"Max cpu time": "RLIMIT_CPU", "Max file size": "RLIMIT_FSIZE", "Max data size": "RLIMIT_DATA", "Max stack size": "RLIMIT_STACK",
	"Max core file size": "RLIMIT_CORE", "Max resident set": "RLIMIT_RSS", "Max processes": "RLIMIT_NPROC", "Max open files": "RLIMIT_NOFILE",
	"Max locked memory": "RLIMIT_MEMLOCK", "Max address space": "RLIMIT_AS", "Max file locks": "RLIMIT_LOCKS", "Max pending signals": "RLIMIT_SIGPENDING",
	"Max msgqueue size": "RLIMIT_MSGQUEUE", "Max nice priority": "RLIMIT_NICE", "Max realtime priority": "RLIMIT_RTPRIO", "Max realtime timeout": "RLIMIT_RTTIME",
}

// limitColumn is how wide the names are (fs/proc/base.c, proc_pid_limits).
const limitColumn = 26

// readKernel reads namespaces, maps of ids, cgroups and limits.
func (s System) readKernel(dir string, p *process) (err error) {
	if p.namespaces, err = s.readNamespaces(dir); err != nil {
		return err
	}
	for name, maps := range map[string]*[]specs.LinuxIDMapping{"uid_map": &p.uidMap, "gid_map": &p.gidMap} {
		text, err := s.text(dir, name)
		if errors.Is(err, os.ErrNotExist) {
			continue // a kernel without user namespaces
		}
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			var m specs.LinuxIDMapping
			if _, err := fmt.Sscan(line, &m.ContainerID, &m.HostID, &m.Size); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			*maps = append(*maps, m)
		}
	}
	if p.cgroups, err = cgroups.ParseCgroupFile(filepath.Join(s.Proc, dir, "cgroup")); err != nil {
		return err
	}
	text, err := s.text(dir, "limits")
	if err != nil {
		return err
	}
	p.limits = make(map[string]uint64)
	for line := range strings.Lines(string(text)) {
		if len(line) <= limitColumn {
			continue
		}
		name, fields := limitNames[strings.TrimSpace(line[:limitColumn])], strings.Fields(line[limitColumn:])
		if name == "" || len(fields) < 2 {
			continue
		}
		p.limits[name] = unix.RLIM_INFINITY
		if fields[1] != "unlimited" {
			if p.limits[name], err = strconv.ParseUint(fields[1], 10, 64); err != nil {
				return fmt.Errorf("limits: %w", err)
			}
		}
	}
	return nil
}

func (s System) readNamespaces(dir string) (map[string]string, error) {
	ids := make(map[string]string)
	for _, kind := range kinds {
		text, err := os.Readlink(filepath.Join(s.Proc, dir, "ns", kind))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		ids[kind] = text
	}
	return ids, nil
}

func (s System) readMounts(dir string) ([]mount, error) {
	text, err := s.text(dir, "mountinfo")
	if err != nil {
		return nil, err
	}
	return parseMounts(bytes.NewReader(text))
}

// parseMounts reads mountinfo, see proc_pid_mountinfo(5).
func parseMounts(r io.Reader) (mounts []mount, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for lines.Scan() {
		before, after, ok := strings.Cut(lines.Text(), " - ")
		front, back := strings.Fields(before), strings.SplitN(after, " ", 3)
		if !ok || len(front) < 6 || len(back) < 3 {
			return nil, fmt.Errorf("mountinfo: line %q is none", lines.Text())
		}
		m := mount{
			device: front[2], root: unescape.Replace(front[3]), point: unescape.Replace(front[4]), kind: back[0],
			options: strings.Split(front[5], ","), super: strings.Split(back[2], ","),
		}
		for _, field := range front[6:] {
			if number, is := strings.CutPrefix(field, "shared:"); is {
				m.group = number
			}
		}
		if m.id, err = strconv.ParseUint(front[0], 10, 64); err != nil {
			return nil, fmt.Errorf("mountinfo: line %q: %w", lines.Text(), err)
		}
		mounts = append(mounts, m)
	}
	return mounts, lines.Err()
}

// readFiles reads the root, the working directory, the program and the open files.
func (s System) readFiles(dir string, p *process) (err error) {
	for name, f := range map[string]*file{"root": &p.root, "cwd": &p.cwd, "exe": &p.exe} {
		if *f, err = s.readFile(name, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	names, err := proc.Names(filepath.Join(s.Proc, dir, "fd"))
	if err != nil {
		return err
	}
	kept := proc.Bound(0)
	for _, name := range names {
		f, err := s.readFile("file "+name, filepath.Join(dir, "fd", name))
		if err == nil {
			err = kept.Take(f.link)
		}
		if err != nil {
			return err
		}
		if !f.named() {
			p.files = append(p.files, f)
			continue // nothing is asked of it, and an epoll's takes the kernel long
		}
		info, err := proc.Head(filepath.Join(s.Proc, dir, "fdinfo", name))
		if err != nil {
			return err
		}
		flags, err := strconv.ParseUint(proc.Status(info).Field("flags"), 8, 32)
		if err != nil {
			return fmt.Errorf("%s: flags: %w", f.name, err)
		}
		f.writable = flags&unix.O_ACCMODE != unix.O_RDONLY && flags&unix.O_PATH == 0
		p.files = append(p.files, f)
	}
	return nil
}

func (s System) readFile(name, at string) (f file, err error) {
	at = filepath.Join(s.Proc, at)
	f.name = name
	if f.link, err = os.Readlink(at); errors.Is(err, unix.ENAMETOOLONG) {
		return f, fmt.Errorf("%s has a path of more than 4095 bytes: close it, or use a shorter one: %w", name, err)
	} else if err != nil || !f.named() {
		return f, err
	}
	st, err := s.Status(at)
	if err != nil {
		return f, err
	}
	f.mount = st.Mnt_id
	if kind := st.Mode & unix.S_IFMT; kind == unix.S_IFCHR || kind == unix.S_IFBLK {
		f.device, f.block = unix.Mkdev(st.Rdev_major, st.Rdev_minor), kind == unix.S_IFBLK
	}
	return f, nil
}

// readMapped reads the files that are mapped, each once.
func (s System) readMapped(dir string, p *process) error {
	in, err := os.Open(filepath.Join(s.Proc, dir, "maps"))
	if err != nil {
		return err
	}
	defer in.Close()
	type id struct {
		device string
		inode  uint64
		path   string
	}
	seen, kept := make(map[id]bool), proc.Bound(0)
	var tooMuch error
	maps, err := proc.ParseMaps(in, func(m *proc.Mapping) bool {
		key := id{m.Device, m.Inode, m.Path}
		if m.Inode == 0 || seen[key] || tooMuch != nil {
			return false
		}
		tooMuch = kept.Take(m.Path)
		seen[key] = true
		return true
	})
	if tooMuch != nil {
		return fmt.Errorf("names of mapped files: %w", tooMuch)
	}
	if err != nil {
		return err
	}
	for _, m := range maps {
		f, err := s.readFile("mapped file", filepath.Join(dir, "map_files", fmt.Sprintf("%x-%x", m.Start, m.End)))
		if err != nil {
			return err
		}
		f.writable = strings.Contains(m.Permissions, "w") && strings.HasSuffix(m.Permissions, "s")
		p.mapped = append(p.mapped, f)
	}
	return nil
}

// readSockets reads the inodes of raw and packet sockets in the process's network namespace.
func (s System) readSockets(dir string, p *process) error {
	p.rawSockets = make(map[string]bool)
	// The column of the inode in each table, from the left.
	for name, column := range map[string]int{"packet": 8, "raw": 9, "raw6": 9} {
		text, err := s.text(dir, "net", name)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			if fields := strings.Fields(line); len(fields) > column {
				p.rawSockets[fields[column]] = true
			}
		}
	}
	return nil
}

// location is a place in a file system, as mountinfo names it.
type location struct{ device, root string }

// locate finds where a path of the host's lies.
func (h *hostView) locate(s System, path string) (location, bool) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return location{}, false
	}
	st, err := s.Status(real)
	if err != nil {
		return location{}, false
	}
	for _, m := range h.mounts {
		if m.id != st.Mnt_id {
			continue
		}
		rest, ok := strings.CutPrefix(real, strings.TrimSuffix(m.point, "/"))
		if !ok {
			return location{}, false
		}
		return location{m.device, filepath.Join(m.root, rest)}, true
	}
	return location{}, false
}
