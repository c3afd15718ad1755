// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package devnode

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// devDir is a /dev of a container, and a descriptor of it.
func devDir(t *testing.T) (string, int) {
	t.Helper()
	dir := t.TempDir()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return dir, fd
}

func nullNode(path string) specs.LinuxDevice {
	return specs.LinuxDevice{Path: path, Type: "c", Major: 1, Minor: 3}
}

func TestMakeNode(t *testing.T) {
	dir, fd := devDir(t)
	mode, id := os.FileMode(0o640), uint32(65534)
	with := nullNode("/dev/nvidia-caps/nvidia-cap1")
	with.FileMode, with.UID, with.GID = &mode, &id, &id
	for _, d := range []specs.LinuxDevice{nullNode("/dev/nvidia0"), nullNode("/dev/nvidia0"), with} {
		if err := makeNode(fd, d); err != nil {
			t.Fatal(err)
		}
	}
	check := func(name string, major, minor, mode, owner uint32) {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
			t.Fatal(err)
		}
		if st.Mode != unix.S_IFCHR|mode || unix.Major(st.Rdev) != major || unix.Minor(st.Rdev) != minor || st.Uid != owner || st.Gid != owner {
			t.Errorf("%s: mode %o, %d:%d, owner %d:%d", name, st.Mode, unix.Major(st.Rdev), unix.Minor(st.Rdev), st.Uid, st.Gid)
		}
	}
	check("nvidia0", 1, 3, 0o666, 0)
	check("nvidia-caps/nvidia-cap1", 1, 3, 0o640, 65534)

	// The node of another machine, and whatever else is there, is replaced.
	other := nullNode("/dev/nvidia0")
	other.Minor = 5
	if err := makeNode(fd, other); err != nil {
		t.Fatal(err)
	}
	check("nvidia0", 1, 5, 0o666, 0)
	if err := os.WriteFile(filepath.Join(dir, "nvidia1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := makeNode(fd, nullNode("/dev/nvidia1")); err != nil {
		t.Fatal(err)
	}
	check("nvidia1", 1, 3, 0o666, 0)
	if err := makeNode(fd, nullNode("/elsewhere/nvidia1")); err == nil {
		t.Error("a node outside /dev was made")
	}
}

// A container that puts symbolic links into its /dev gets no file changed
// outside of it.
func TestNodesFollowNoLinks(t *testing.T) {
	dir, fd := devDir(t)
	outside := t.TempDir()
	victim := filepath.Join(outside, "nvidia-cap1")
	if err := os.WriteFile(victim, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for link, target := range map[string]string{"nvidia0": victim, "nvidia-caps": outside} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := makeNode(fd, nullNode("/dev/nvidia0")); err != nil {
		t.Fatal(err)
	}
	if err := makeNode(fd, nullNode("/dev/nvidia-caps/nvidia-cap2")); err == nil {
		t.Error("a directory that is a link was followed")
	}
	if err := (&Restored{Spec: &specs.Spec{}}).removeNodes(fd); err == nil {
		t.Error("a directory that is a link was listed")
	}
	if data, err := os.ReadFile(victim); err != nil || string(data) != "precious" {
		t.Errorf("the file outside: %q, error %v", data, err)
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 {
		t.Errorf("outside: %v, error %v", entries, err)
	}
}

func TestRemoveNodes(t *testing.T) {
	dir, fd := devDir(t)
	for _, path := range []string{"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidiactl", "/dev/nvidia-caps/nvidia-cap1", "/dev/null"} {
		if err := makeNode(fd, nullNode(path)); err != nil {
			t.Fatal(err)
		}
	}
	p := Restored{
		Spec:    &specs.Spec{Mounts: []specs.Mount{{Destination: "/dev/nvidia2"}, {Destination: "/dev/nvidia0"}}},
		Devices: []specs.LinuxDevice{nullNode("/dev/nvidiactl")},
		Stray:   []string{"/dev/nvidia0"},
	}
	if err := p.removeNodes(fd); err != nil {
		t.Fatal(err)
	}
	var left []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			left = append(left, filepath.Base(path))
		}
		return err
	})
	if want := []string{"null", "nvidia2", "nvidiactl"}; err != nil || !slices.Equal(left, want) {
		t.Errorf("left are %v, error %v; want %v", left, err, want)
	}
}

// What is mounted already is not mounted again, wherever the container's links lead.
func TestMissing(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"mounted", "plain"} {
		if err := os.WriteFile(at(name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("mounted", at("link")); err != nil {
		t.Fatal(err)
	}
	var names []string
	err := host.InNewMountNamespace(func() error {
		if err := unix.Mount("/dev/null", at("mounted"), "", unix.MS_BIND, ""); err != nil {
			return err
		}
		var mounts []specs.Mount
		for _, name := range []string{"mounted", "plain", "link", "none"} {
			mounts = append(mounts, specs.Mount{Destination: at(name)})
		}
		found, err := missing(mounts)
		for _, m := range found {
			names = append(names, filepath.Base(m.Destination))
		}
		return err
	})
	if want := []string{"plain", "none"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("missing are %v, error %v; want %v", names, err, want)
	}
}

// In a user namespace runc mounts nodes: what CRIU mounts in their place is not the container's any more.
func TestFixedSpec(t *testing.T) {
	nodes := []specs.LinuxDevice{nullNode("/dev/nvidiactl"), nullNode("/dev/fuse")}
	p := Restored{Devices: nodes, Stray: []string{"/dev/nvidiactl"}, Spec: &specs.Spec{
		Linux:  &specs.Linux{Devices: nodes[1:]},
		Mounts: []specs.Mount{{Destination: "/data"}, {Destination: "/dev/nvidiactl", Source: "/dev/null"}},
	}}
	got := p.Fixed()
	if len(got.Mounts) != 1 || got.Mounts[0].Destination != "/data" || len(got.Linux.Devices) != 2 {
		t.Errorf("it has %v and %v", got.Mounts, got.Linux.Devices)
	}
	if len(p.Spec.Mounts) != 2 || len(p.Spec.Linux.Devices) != 1 {
		t.Errorf("CRIU's spec has become %v and %v", p.Spec.Mounts, p.Spec.Linux.Devices)
	}
}

// A tmpfs of a container with a user namespace, in which the host's root has no ID, gets what is mounted too.
func TestMountInUserNamespace(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 200000, Size: 1}}
	cmd := exec.Command("sh", "-c", `mount -t tmpfs none "$0" && echo mounted && exec sleep 1000`, dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: ids, GidMappings: ids, Pdeathsig: unix.SIGKILL,
		GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{},
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "mounted\n" {
		t.Fatalf("the namespaces are not made: %q, %v", line, err)
	}
	at := filepath.Join(dir, "node")
	null, err := openTree(specs.Mount{Source: "/dev/null", Destination: at})
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null.fd)
	err = host.InMountNamespace(cmd.Process.Pid, func() error {
		if err := null.mount(); err != nil {
			return err
		}
		left, err := missing([]specs.Mount{{Destination: at}})
		if err == nil && len(left) > 0 {
			err = errors.New("nothing is mounted")
		}
		if uid, _ := unix.SetfsuidRetUid(-1); uid != 0 {
			err = errors.Join(err, fmt.Errorf("the thread goes on as user %d", uid))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// What the spec masks is masked where the dump had nothing to mask, and only there, and once.
func TestMaskMissing(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread() // whose end would kill the program
	defer runtime.UnlockOSThread()
	cmd := exec.Command("sh", "-c", "mount --make-rprivate / && mount --bind /dev/zero /proc/version && echo mounted && exec sleep 1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "mounted\n" {
		t.Fatalf("the namespace is not made: %q, %v", line, err)
	}
	pid := cmd.Process.Pid
	hidden := []string{"/proc/uptime", "/proc/irq", "/sys/kernel/mm"}
	spec := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{
		MaskedPaths: append(hidden, "/proc/version", "/proc/none", "/proc/uptime/none", "/proc/irq/default_smp_affinity", "/tmp"),
	}}
	mounts := func() (mounts []string) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Split(string(text), "\n")
	}
	before := len(mounts())
	for range 2 {
		if err := (&Restored{Spec: spec}).mountMissing(pid); err != nil {
			t.Fatal(err)
		}
		if n := len(mounts()) - before; n != len(hidden) {
			t.Fatalf("%d mounts more, not %d: %q", n, len(hidden), mounts())
		}
	}
	err = host.InMountNamespace(pid, func() error {
		text, err := os.ReadFile(hidden[0])
		for _, dir := range hidden[1:] {
			entries, derr := os.ReadDir(dir)
			if len(entries) > 0 {
				err = errors.Join(err, fmt.Errorf("%s has %v", dir, entries))
			}
			err = errors.Join(err, derr)
			if werr := os.WriteFile(filepath.Join(dir, "x"), nil, 0o600); !errors.Is(werr, unix.EROFS) {
				err = errors.Join(err, fmt.Errorf("%s can be written to: %w", dir, werr))
			}
		}
		if len(text) > 0 {
			err = errors.Join(err, fmt.Errorf("%s is %q", hidden[0], text))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: []string{"CAP_SYS_ADMIN"}}
	if more := (&Restored{Spec: spec}).masks(); len(more) > 0 { // it may have unmounted its own
		t.Errorf("with CAP_SYS_ADMIN it gets %v", more)
	}
}
