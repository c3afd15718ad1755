// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// A CRIU that restores mounts no file system that the host has too, and changes none.
func TestSandboxMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may make a mount namespace")
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no C compiler")
	}
	dir := t.TempDir()
	sources, err := filepath.Glob("plugin/*.c")
	if err != nil {
		t.Fatal(err)
	}
	program, library := filepath.Join(dir, "mounts"), filepath.Join(dir, PluginName)
	for _, args := range [][]string{
		append([]string{"-fPIC", "-shared", "-fvisibility=hidden", "-o", library}, sources...),
		{"-rdynamic", "-o", program, "testdata/mounts.c"},
	} {
		if out, err := exec.Command("gcc", append([]string{"-Wall", "-Wextra", "-Werror", "-O2"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	host, own := t.TempDir(), "/tmp/own"
	unified, hierarchy := "", "" // of this machine's cgroups
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		_, options, _ := strings.Cut(m.VFSOptions, ",")
		if m.FSType == "cgroup2" && unified == "" {
			unified = options
		} else if m.FSType == "cgroup" {
			hierarchy = options
		}
	}
	type mount struct {
		target, kind string
		flags        uint32
		options      string
		want         string // what the kernel is asked with
	}
	const refused = "refused"
	tries := []mount{
		{own, "tmpfs", unix.MS_NOSUID, "size=1m", "size=1m"},
		{own, "proc", unix.MS_MGC_VAL | unix.MS_RDONLY, "", ""},
		{own, "sysfs", unix.MS_RDONLY, "", ""},
		{own, "devpts", 0, "newinstance", "newinstance"},
		{own, "mqueue", 0, "", ""},
		{own, "overlay", 0, "lowerdir=/a:/b", "lowerdir=/a:/b"},
		{own, "cgroup2", 0, "favordynmods", unified},
		// What is there already, in its place or in another one.
		{own, "", unix.MS_BIND | unix.MS_REC, "", ""},
		{host, "", unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY, "", ""},
		{host, "", unix.MS_PRIVATE, "", ""},
		{own, "none", unix.MS_SLAVE | unix.MS_REC, "", ""},
		{own, "", unix.MS_MOVE, "", ""},
		{own, "", unix.MS_REMOUNT | unix.MS_RDONLY, "", ""},
		// The file systems that the host has mounted.
		{host, "", unix.MS_REMOUNT | unix.MS_RDONLY, "", refused},
		{host, "tmpfs", unix.MS_REMOUNT | unix.MS_RDONLY, "", refused},
		{host, "", unix.MS_REMOUNT | unix.MS_PRIVATE, "", refused},
		{host, "", unix.MS_MGC_VAL | unix.MS_REMOUNT | unix.MS_RDONLY, "", refused},
		{"/usr", "", unix.MS_REMOUNT | unix.MS_RDONLY, "", refused},
		{"/dev/null", "", unix.MS_REMOUNT | unix.MS_RDONLY, "", refused},
		{"/nowhere", "", unix.MS_REMOUNT, "", refused},
		// The kernel takes the upper half of the flags of an old program for nothing.
		{own, "devtmpfs", unix.MS_MGC_VAL | unix.MS_RDONLY, "", refused},
		{own, "devtmpfs", unix.MS_RDONLY, "", refused},
		{own, "cgroup", 0, "none,name=gpuckpt-test-there-is-none", refused},
		{own, "cgroup", 0, "", refused},
		{own, "cgroup", 0, ",", refused},
	}
	for _, kind := range []string{
		"", "securityfs", "debugfs", "tracefs", "pstore", "efivarfs", "configfs", "fusectl", "binfmt_misc", "bpf", "selinuxfs", "smackfs", "hugetlbfs", "ramfs", "autofs", "rpc_pipefs", "nfsd", "fuse", "fuse.x", "tmpfs.x",
		"ext4", "xfs", "btrfs", "nfs", "9p", "aufs", "simfs", "unsupported", "auto_cr", "a-module-that-would-be-loaded",
	} {
		tries = append(tries, mount{own, kind, 0, "", refused})
	}
	if hierarchy != "" {
		asked := hierarchy
		if strings.HasPrefix(asked, "name=") {
			asked = "none," + asked
		}
		tries = append(tries, mount{own, "cgroup", 0, asked, asked}, mount{own, "cgroup", 0, asked + ",release_agent=/x", refused}, mount{own, "cgroup", 0, asked + ",clone_children", refused})
	}
	run := func(t *testing.T, preload string, watch string) ([]string, string, error) {
		root, work := t.TempDir(), t.TempDir()
		settings := fmt.Sprintf("sandbox\t%s\nwork\t%s\nbind\tro\t/usr\nbind\trw\t/dev/null\nbind\trw\t%s\n%s", root, work, host, watch)
		if err := os.WriteFile(filepath.Join(dir, pluginSettings), []byte(settings), 0o600); err != nil {
			t.Fatal(err)
		}
		args := []string{library, host, own}
		for _, m := range tries {
			args = append(args, m.target, m.kind, fmt.Sprintf("%x", m.flags), m.options)
		}
		cmd := exec.Command(program, args...)
		cmd.Env = []string{"LD_PRELOAD=" + preload}
		out, err := cmd.Output()
		said := ""
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			said = string(exit.Stderr)
		}
		return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n"), said, err
	}
	got, said, err := run(t, library, "mounts\n")
	if err != nil || len(got) != len(tries) {
		t.Fatalf("%v: %s; %d answers for %d", err, said, len(got), len(tries))
	}
	for i, m := range tries {
		if got[i] != m.want {
			t.Errorf("mount %q at %s with the flags %#x and the options %q: %q, want %q", m.kind, m.target, m.flags, m.options, got[i], m.want)
		}
	}
	// A container that may mount what it likes.
	got, said, err = run(t, library, "")
	if err != nil || len(got) != len(tries) {
		t.Fatalf("%v: %s; %d answers for %d", err, said, len(got), len(tries))
	}
	for i, m := range tries {
		if got[i] != m.options {
			t.Errorf("unwatched: mount %q at %s with the options %q: %q", m.kind, m.target, m.options, got[i])
		}
	}
	// A CRIU that the library was not loaded into first is not watched, and enters no sandbox.
	if _, said, err := run(t, "", "mounts\n"); err == nil || !strings.Contains(said, "watch what CRIU mounts") {
		t.Errorf("without the library: %v, %q", err, said)
	}
	if left, err := mountinfo.Mounted(host); err != nil || left {
		t.Errorf("it is mounted on the host: %v, %v", left, err)
	}
}
