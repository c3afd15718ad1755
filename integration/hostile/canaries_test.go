// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/hostile/trials"
)

// secret is what no container may have a copy of.
const secret = "as the host has it, and nobody else"

// canaries are things of the host that no restore may change.
type canaries struct {
	trials.Kept
	dir    string // files of the host's
	pid    int    // a process of the host's
	cgroup string // a cgroup of the host's, by its name in each hierarchy
}

// covered are the directories of the machine's in which nothing may be written. Below their overlays is
// what others write there meanwhile.
var covered = map[string]*harness.Covered{"/etc": nil, "/var/spool": nil, "/usr/bin": nil, "/usr/sbin": nil, "/usr/local/bin": nil, "/root": nil, "/boot": nil, "/dev": nil}

// newCanaries makes them. The machine's own are looked at as well: its directories, settings, mounts.
func newCanaries(t *testing.T) *canaries {
	t.Helper()
	c := &canaries{dir: t.TempDir(), cgroup: "/gpuckpt-canary-" + filepath.Base(t.TempDir()) + fmt.Sprint(os.Getpid())}
	c.Look = c.look
	if err := os.WriteFile(c.file(), []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(c.file(), filepath.Join(c.dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(c.dir, "directory"), 0o755); err != nil {
		t.Fatal(err)
	}
	process := exec.Command("sleep", "1000000")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	c.pid = process.Process.Pid
	harness.Within(t, "the host's process is there", func() bool {
		name, err := harness.StatusField(c.pid, "Name")
		return err == nil && name == "sleep"
	})
	for _, dir := range hierarchies(t) {
		at := dir + c.cgroup
		if err := os.Mkdir(at, 0o755); err != nil {
			t.Logf("no cgroup in %s: %v", dir, err)
			continue
		}
		_ = os.WriteFile(at+"/cgroup.procs", fmt.Append(nil, c.pid), 0) // cpuset needs settings first
		t.Cleanup(func() {
			if err := os.Remove(at); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() {
		if err := process.Process.Kill(); err != nil {
			t.Errorf("the host's process is gone: %v", err)
		}
		_ = process.Wait()
	})
	return c
}

func (c *canaries) file() string { return filepath.Join(c.dir, "canary") }

// paths lead to the file in the ways that are known, and to CRIU's descriptors.
func (c *canaries) paths() []string {
	return []string{
		c.file(), hostFile(c.file()), strings.Repeat("../", 30) + c.file()[1:],
		"/proc/1/root" + c.file(), fmt.Sprintf("/proc/%d/root%s", c.pid, c.file()), "/proc/self/fd/126",
	}
}

// keep has the canaries stay as they are now. What is different between two looks changes by itself.
func (c *canaries) keep(t *testing.T, between func()) {
	t.Helper()
	first := c.look()
	between()
	for dir := range covered { // where something is written that is seen
		probe := filepath.Join(dir, "gpuckpt-canary")
		if err := os.WriteFile(probe, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if c.look()[probe] == "" {
			t.Errorf("what is written in %s is not seen", dir)
		}
		if err := os.Remove(probe); err != nil {
			t.Fatal(err)
		}
	}
	now, skipped := c.Keep(first)
	// A canary that is not looked at says nothing.
	for _, name := range []string{c.file(), "mounts", "/proc/sys/kernel/core_pattern", fmt.Sprintf("process %d: status", c.pid)} {
		if now[name] == "" || slices.Contains(skipped, name) {
			t.Errorf("the canary %s is not looked at", name)
		}
	}
	lsm := "no AppArmor on this machine"
	if now[apparmor] != "" {
		lsm = "AppArmor's list of profiles"
	}
	t.Logf("%d canaries; %s; %d that change by themselves: %v", len(now)-len(skipped), lsm, len(skipped), skipped)
}

const apparmor = "/sys/kernel/security/apparmor/profiles"

// loaded are profiles that the clients of other tests load.
var loaded = regexp.MustCompile(`(?m)^(cri-containerd\.apparmor\.d|nerdctl-default|docker-default) .*\n`)

// volatile are settings that change by themselves, now and then.
var volatile = regexp.MustCompile(`^/proc/sys/(kernel/(random/|ns_last_pid|pty/nr|perf_event_max_sample_rate|sched_domain/)|fs/(.*-nr|.*-state|quota/|aio-nr)|net/netfilter/.*count|vm/stat_refresh)`)

// look returns what the canaries are like, by names.
func (c *canaries) look() map[string]string {
	seen := make(map[string]string)
	_ = filepath.WalkDir(c.dir, func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			seen[path] = status(path)
		}
		return nil
	})
	for dir, cover := range covered {
		written, err := cover.Written()
		if err != nil {
			seen[dir] = err.Error()
		}
		for name, path := range written {
			seen[filepath.Join(dir, name)] = status(path)
		}
	}
	// Of these the overlays have no names: they are the machine's.
	for _, dir := range []string{"/", "/usr/lib"} {
		var st unix.Stat_t
		if err := unix.Lstat(dir, &st); err == nil {
			seen[dir] = fmt.Sprint(st.Ino, st.Mode, st.Uid, st.Gid)
		}
	}
	_ = filepath.WalkDir("/proc/sys", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !volatile.MatchString(path) {
			data, _ := os.ReadFile(path)
			seen[path] = string(data)
		}
		return nil
	})
	for _, name := range []string{"route", "if_inet6", "raw", "raw6", "packet", "udp", "udp6"} {
		data, _ := os.ReadFile("/proc/net/" + name)
		seen["/proc/net/"+name] = string(data)
	}
	for _, name := range []string{"shm", "sem", "msg"} {
		data, _ := os.ReadFile("/proc/sysvipc/" + name)
		seen["/proc/sysvipc/"+name] = string(data)
	}
	if data, err := os.ReadFile(apparmor); err == nil {
		seen[apparmor] = loaded.ReplaceAllString(string(data), "")
	}
	seen["mounts"] = mounted("/proc/self/mountinfo")
	c.lookAtProcess(seen)
	c.lookAtCgroups(seen)
	return seen
}

// status returns what a file is like. Reading it changes nothing of that.
func status(path string) string {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err.Error()
	}
	return fmt.Sprint(st.Ino, st.Mode, st.Uid, st.Gid, st.Rdev, st.Size, st.Mtim, st.Ctim, st.Nlink)
}

// mounted returns the mounts but those of the containerds of this test and of others, which go when
// their directories are removed.
func mounted(path string) string {
	data, _ := os.ReadFile(path)
	var kept []string
	for line := range strings.Lines(string(data)) {
		if !strings.Contains(line, "/gpuckpt-") && !strings.Contains(line, shared.Namespace()) && !strings.Contains(line, checking.Namespace()) {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

func (c *canaries) lookAtProcess(seen map[string]string) {
	at := fmt.Sprintf("/proc/%d/", c.pid)
	note := func(name, value string) { seen[fmt.Sprintf("process %d: %s", c.pid, name)] = value }
	for _, name := range []string{"limits", "oom_score_adj", "loginuid", "sessionid", "cgroup", "environ", "cmdline", "maps", "timerslack_ns", "coredump_filter", "uid_map"} {
		data, _ := os.ReadFile(at + name)
		note(name, string(data))
	}
	data, _ := os.ReadFile(at + "status")
	var kept []string
	for line := range strings.Lines(string(data)) {
		if !strings.Contains(line, "ctxt_switches") && !strings.HasPrefix(line, "Vm") && !strings.HasPrefix(line, "Rss") && !strings.HasPrefix(line, "SigQ") {
			kept = append(kept, line)
		}
	}
	note("status", strings.Join(kept, ""))
	for _, name := range []string{"cwd", "root", "exe", "fd/0", "fd/1", "fd/2", "ns/mnt", "ns/net", "ns/ipc", "ns/uts", "ns/pid", "ns/user", "ns/cgroup"} {
		to, _ := os.Readlink(at + name)
		note(name, to)
	}
	note("mounts", mounted(at+"mountinfo"))
}

// hierarchies are the mounted hierarchies of cgroups.
func hierarchies(t *testing.T) []string {
	t.Helper()
	dirs, err := harness.CgroupsOf("/")
	if err != nil || len(dirs) == 0 {
		t.Fatal(dirs, err)
	}
	return dirs
}

func (c *canaries) lookAtCgroups(seen map[string]string) {
	tops, _ := harness.CgroupsOf("/")
	for _, dir := range slices.Concat(tops, existing(tops, c.cgroup)) {
		files, _ := os.ReadDir(dir)
		for _, f := range files {
			path := filepath.Join(dir, f.Name())
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil || f.IsDir() || f.Name() == "cgroup.subtree_control" && slices.Contains(tops, dir) {
				continue // cgroups of others come and go, and need controllers
			}
			text := fmt.Sprint(st.Mode, st.Uid, st.Gid)
			if st.Mode&0o200 != 0 && st.Mode&0o400 != 0 && st.Mode&unix.S_IFMT == unix.S_IFREG && !counts.MatchString(f.Name()) {
				data, _ := os.ReadFile(path)
				text += fmt.Sprintf(" %x %.300s", sha256.Sum256(data), data)
			}
			seen[path] = text
		}
	}
}

// counts are files of cgroups that can be written to, and change by themselves.
var counts = regexp.MustCompile(`usage|\.stat|procs|tasks|threads|pressure|events|reset|failcnt|io_|time`)

func existing(tops []string, name string) (dirs []string) {
	for _, top := range tops {
		if _, err := os.Stat(top + name); err == nil {
			dirs = append(dirs, top+name)
		}
	}
	return dirs
}
