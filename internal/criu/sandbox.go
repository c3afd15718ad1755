// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// sandboxName is the directory in the bundle that CRIU mounts its root on. The mounts are CRIU's
// own and end with it.
const sandboxName = "criu-sandbox"

// Sandbox is what a CRIU that restores sees of the host, and may do: see plugin/sandbox.c.
type Sandbox struct {
	// Spec is the container's.
	Spec *specs.Spec
	// Work is the directory that CRIU works in.
	Work string
	// Programs is the directory of programs that come first in CRIU's $PATH: of tmpfs.Programs.
	Programs string
	// Root is where runc mounts the container's root file system for CRIU.
	Root string
	// Traces reports whether CRIU keeps CAP_SYS_PTRACE, with which /proc/PID/root leads to the host's
	// files: where threads are let go at the gate and held again, as a CUDA driver's are, because other
	// threads it seizes while they still have its own credentials; where held processes of other users
	// make calls, for which it reads their mappings; and where a program that it starts opens a
	// descriptor of the shim's.
	Traces bool
}

// Programs of the host that CRIU may run (tar, iptables), with their libraries.
var hostPrograms = []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache"}

// Devices that CRIU opens or binds into a container.
var hostDevices = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/net/tun"}

// AppArmor's and SELinux's file systems, by which CRIU knows that the host has one of them.
var hostLSM = []string{"/sys/kernel/security/apparmor", "/sys/fs/selinux"}

// namespaced are settings in /proc/sys that each IPC or network namespace has for itself. CRIU
// writes those of the container's.
var namespaced = []string{
	"/proc/sys/net", "/proc/sys/fs/mqueue", "/proc/sys/kernel/hostname", "/proc/sys/kernel/domainname", "/proc/sys/kernel/msgmax", "/proc/sys/kernel/msgmnb", "/proc/sys/kernel/msgmni",
	"/proc/sys/kernel/auto_msgmni", "/proc/sys/kernel/msg_next_id", "/proc/sys/kernel/sem", "/proc/sys/kernel/sem_next_id",
	"/proc/sys/kernel/shmall", "/proc/sys/kernel/shmmax", "/proc/sys/kernel/shmmni", "/proc/sys/kernel/shm_next_id",
	"/proc/sys/kernel/shm_rmid_forced",
}

// restoring are the capabilities that a restore needs: docs/decisions/0017-criu-sandbox.md says what
// for. Those that the spec grants are needed too, since CRIU cannot give what it does not have.
var restoring = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_IPC_OWNER", "CAP_SYS_CHROOT",
	"CAP_SYS_ADMIN", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_MKNOD", "CAP_LEASE", "CAP_SETFCAP", "CAP_CHECKPOINT_RESTORE",
}

// capabilities returns the set that CRIU keeps, a bit each.
func (s Sandbox) capabilities() uint64 {
	names := slices.Clone(restoring)
	if s.Traces {
		names = append(names, "CAP_SYS_PTRACE")
	}
	if caps := s.Spec.Process.Capabilities; caps != nil {
		names = slices.Concat(names, caps.Bounding, caps.Permitted, caps.Inheritable, caps.Ambient)
	}
	return bundle.Capabilities(names)
}

// mountsAny reports whether the container itself may mount what it likes.
func (s Sandbox) mountsAny() bool {
	caps := s.Spec.Process.Capabilities
	return caps != nil && slices.ContainsFunc(caps.Bounding, func(name string) bool { return strings.EqualFold(name, "CAP_SYS_ADMIN") })
}

// visible is a file or directory of the host that CRIU sees.
type visible struct {
	path     string
	readOnly bool
}

// lines returns what the plugin is told. plugins is the directory of CRIU's plugins.
func (s Sandbox) lines(dir, plugins string) ([]string, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	lines := []string{fmt.Sprintf("caps\t%x", s.capabilities())}
	if !s.mountsAny() {
		lines = append(lines, "mounts")
		if strings.ContainsAny(plugins, ": $") { // which LD_PRELOAD takes for something else
			return nil, fmt.Errorf("the path %q has a colon, a space or a dollar sign: CRIU cannot load its plugin first", plugins)
		}
	}
	whole := len(lines)
	lines = append(lines, "sandbox\t"+dir, "work\t"+s.Work, "proc")
	if slices.ContainsFunc(s.Spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
		return n.Type == specs.UserNamespace && !host.OwnsNamespace(n)
	}) {
		lines = append(lines, "users")
	}
	tar, err := tmpfs.Program()
	if err != nil {
		return nil, err
	}
	// CRIU has the images by a descriptor of a directory in a mount namespace of its own (Copy).
	sees := []visible{{plugins, true}, {s.Root, false}, {s.Programs, false}, {tar, true}}
	links := map[string]string{}
	for _, path := range hostPrograms {
		// On most systems all but /usr are links.
		if to, err := os.Readlink(path); err == nil && filepath.Dir(path) == "/" {
			lines = append(lines, "link\t"+path+"\t"+to)
			links[path] = filepath.Join("/", to)
		} else if host.HasFile(path) {
			sees = append(sees, visible{path, true})
		}
	}
	found, err := filepath.Glob(filepath.Join(plugins, "*.so"))
	if err != nil {
		return nil, err
	}
	for _, link := range found {
		if to, err := os.Readlink(link); err == nil {
			sees = append(sees, visible{to, true})
		}
	}
	for _, path := range hostDevices {
		if host.HasFile(path) {
			sees = append(sees, visible{path, false})
		}
	}
	for _, path := range hostLSM {
		if host.HasFile(path) {
			sees = append(sees, visible{path, true})
		}
	}
	for _, d := range s.Spec.Linux.Devices {
		if host.HasFile(d.Path) {
			sees = append(sees, visible{d.Path, false})
		}
	}
	for _, m := range s.Spec.Mounts {
		switch {
		case m.Type == "cgroup":
			mounts, err := host.CgroupMounts()
			if err != nil {
				return nil, err
			}
			for _, m := range mounts {
				lines = append(lines, fmt.Sprintf("cgroup\t%s\t%s\t%s", strings.TrimPrefix(m.Subsystems[0], "name="), m.Mountpoint, m.Root))
			}
		case cdi.IsBind(m):
			source := m.Source
			if !filepath.IsAbs(source) { // as runc takes it
				source = filepath.Join(filepath.Dir(dir), source)
			}
			source = filepath.Clean(source)
			switch top, below, _ := strings.Cut(source[1:], "/"); { // nothing is mounted on a link
			case links["/"+top] == "":
			case below == "":
				lines = slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, "link\t"+source+"\t") })
			default: // such as /lib/modules
				source = filepath.Join(links["/"+top], below)
			}
			// CRIU makes directories for its mounts in /tmp and writes to /proc/PID, also where these are the host's.
			writes := source == "/tmp" || source == "/proc"
			sees = append(sees, visible{source, slices.Contains(bundle.Bars(m), "ro") && !writes})
		}
	}
	if slices.ContainsFunc(sees, func(v visible) bool { return v.path == "/" }) {
		return lines[:whole], nil // the container has all of the host, and CRIU needs it
	}
	for _, v := range outermost(sees) {
		access := "rw"
		if v.readOnly {
			access = "ro"
		}
		lines = append(lines, "bind\t"+access+"\t"+v.path)
	}
	for _, path := range namespaced { // after /proc, whosesoever it is
		lines = append(lines, "writable\t"+path)
	}
	for _, l := range lines {
		if strings.ContainsRune(l, '\n') || strings.Count(l, "\t") > 3 || len(l) > 4096 {
			return nil, fmt.Errorf("path %q is too long or has a tab or newline", l)
		}
	}
	return lines, nil
}

// outermost returns the paths that are not below another one, sorted, each once. One that is
// asked for in both ways is writable, and so is what is below it.
func outermost(all []visible) (out []visible) {
	slices.SortFunc(all, func(a, b visible) int { return strings.Compare(a.path, b.path) })
	for _, v := range all {
		at := slices.IndexFunc(out, func(o visible) bool {
			return o.path == v.path || strings.HasPrefix(v.path, strings.TrimSuffix(o.path, "/")+"/")
		})
		switch {
		case at < 0:
			out = append(out, v)
		case out[at].path == v.path:
			out[at].readOnly = out[at].readOnly && v.readOnly
		}
	}
	return out
}
