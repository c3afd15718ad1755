// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// places refuses a root, working directory, program, open or mapped file that lies on no mount of the
// container's: of its first process's mount namespace, or of one that another process has made. Such a
// process has its program, and may have files, from the namespace that it was in before.
func (c *checker) places(p *process) error {
	for _, f := range slices.Concat([]file{p.root, p.cwd, p.exe}, p.mapped, p.files) {
		if !f.named() {
			if err := c.nameless(f); err != nil {
				return err
			}
			continue
		}
		on, ok := c.points[f.mount]
		if !ok {
			if c.host.internal[f.mount] || strings.HasPrefix(f.link, "/[aio]") {
				continue // shared memory without a file
			}
			if f.hostsNull() {
				continue
			}
			return fmt.Errorf("its %s (%s) is on no mount of the container: it is the host's, or the kernel's, such as a POSIX message queue or memory of memfd_secret, which CRIU cannot dump; close it before a checkpoint", f.name, f.link)
		}
		if err := c.onMount(f, on); err != nil {
			return err
		}
	}
	return nil
}

// hostsNull reports whether an open file is the host's /dev/null. Runc gives it to a program that was dumped
// with a pipe as standard input or output, where the client has none for it: in the place of each
// descriptor of that pipe. Every container has this device, and nothing can be reached from it.
func (f file) hostsNull() bool {
	return strings.HasPrefix(f.name, "file ") && f.link == "/dev/null" && !f.block && f.device == unix.Mkdev(1, 3)
}

// nameless refuses a descriptor of a namespace of the host's that the spec has one for.
func (c *checker) nameless(f file) error {
	kind, id, _ := strings.Cut(f.link, ":")
	wanted := slices.ContainsFunc(c.spec.Linux.Namespaces, func(ns specs.LinuxNamespace) bool {
		return kinds[ns.Type] == kind && c.System.Namespace(kind, ns.Path) != c.host.namespaces[kind]
	})
	if wanted && id != "" && f.link == c.host.namespaces[kind] {
		return fmt.Errorf("its %s is the host's %s namespace", f.name, kind)
	}
	return nil
}

// processDirectory matches the directory of a process, which has not ended.
var processDirectory = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^/proc/[0-9]+$`) })

// onMount refuses a directory of /proc that CRIU dumps and cannot restore, a device that the spec does not grant, and a kernel setting that the spec hides.
func (c *checker) onMount(f file, on mount) error {
	if c.CRIU == 0 && on.kind == "proc" && processDirectory().MatchString(f.link) {
		// CRIU 4.2 writes a slash behind the name, and what follows in its memory.
		return fmt.Errorf("its %s is the directory of a process (%s), which CRIU cannot dump: close it before a checkpoint, or open a file in it instead", f.name, f.link)
	}
	if f.device != 0 && !c.grants(f) {
		return fmt.Errorf("its %s (%s) is the device %d:%d, which the spec does not grant", f.name, f.link, unix.Major(f.device), unix.Minor(f.device))
	}
	if c.has(unix.CAP_SYS_ADMIN) || !strings.HasPrefix(f.link, "/proc/") && !strings.HasPrefix(f.link, "/sys/") {
		return nil
	}
	below := func(paths []string) bool {
		return slices.ContainsFunc(paths, func(p string) bool {
			p = path.Clean(p)
			// What is mounted there masks or protects it.
			return on.point != p && (f.link == p || strings.HasPrefix(f.link, p+"/"))
		})
	}
	switch {
	case below(c.spec.Linux.MaskedPaths):
		return fmt.Errorf("its %s is %s, which the spec masks", f.name, f.link)
	case f.writable && (on.point == "/proc" || on.point == "/sys") && below(c.spec.Linux.ReadonlyPaths):
		return fmt.Errorf("its %s is %s, open for writing, which the spec makes read-only", f.name, f.link)
	}
	return nil
}

// always are devices that runc grants to every container: major and minor, -1 for any.
var always = [][2]int64{{1, 3}, {1, 5}, {1, 7}, {1, 8}, {1, 9}, {5, 0}, {5, 1}, {5, 2}, {10, 200}, {136, -1}}

// grants reports whether the spec lets the container open a device.
func (c *checker) grants(f file) bool {
	major, minor := int64(unix.Major(f.device)), int64(unix.Minor(f.device))
	fits := func(m, n int64) bool { return (m < 0 || m == major) && (n < 0 || n == minor) }
	kind := "c"
	if f.block {
		kind = "b"
	}
	if kind == "c" && slices.ContainsFunc(always, func(d [2]int64) bool { return fits(d[0], d[1]) }) {
		return true
	}
	if slices.ContainsFunc(c.spec.Linux.Devices, func(d specs.LinuxDevice) bool {
		return (d.Type == kind || d.Type == "u" && kind == "c") && fits(d.Major, d.Minor)
	}) {
		return true
	}
	if c.spec.Linux.Resources == nil {
		return false
	}
	number := func(n *int64) int64 {
		if n == nil {
			return -1
		}
		return *n
	}
	return slices.ContainsFunc(c.spec.Linux.Resources.Devices, func(d specs.LinuxDeviceCgroup) bool {
		return d.Allow && (d.Type == "" || d.Type == "a" || d.Type == kind) && fits(number(d.Major), number(d.Minor))
	})
}
