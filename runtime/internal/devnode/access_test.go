// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package devnode

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

func TestRuncDeviceRules(t *testing.T) {
	for _, test := range []struct {
		name, text string
		rules      int
		refused    bool
	}{
		{"good", `{"id":"a","config":{"cgroups":{"path":"/x","devices":[{"type":97,"major":-1,"minor":-1,"permissions":"rwm","allow":false},{"type":99,"major":1,"minor":3,"permissions":"rw","allow":true}]}}}`, 2, false},
		{"none", `{"config":{"cgroups":{}}}`, 0, true},
		{"unknown type", `{"config":{"cgroups":{"devices":[{"type":112}]}}}`, 0, true},
		{"no JSON", `{`, 0, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "state.json")
			if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			rules, err := runcDeviceRules(path)
			if (err != nil) != test.refused || len(rules) != test.rules {
				t.Fatalf("got %d rules, error %v", len(rules), err)
			}
			if test.refused {
				return
			}
			if r := rules[0]; r.Allow || r.Type != "a" || *r.Major != -1 || *r.Minor != -1 || r.Access != "rwm" {
				t.Errorf("the first rule is %+v", r)
			}
			if r := rules[1]; !r.Allow || r.Type != "c" || *r.Major != 1 || *r.Minor != 3 || r.Access != "rw" {
				t.Errorf("the second rule is %+v", r)
			}
		})
	}
}

// The rules of a cgroup v2 are replaced, not added to.
func TestReplaceDeviceProgram(t *testing.T) {
	root := ""
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			root = dir
		}
	}
	if root == "" || os.Getuid() != 0 {
		t.Skip("needs root and a cgroup2 file system")
	}
	dir, err := os.MkdirTemp(root, "gpuckpt-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	// A process in it that tries both devices.
	can := func(path string) bool {
		t.Helper()
		cg, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer cg.Close()
		cmd := exec.Command("head", "-c", "0", path)
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cg.Fd())}
		err = cmd.Run()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return err == nil
	}
	number := func(n int64) *int64 { return &n }
	deny := specs.LinuxDeviceCgroup{Allow: false, Type: "a", Major: number(-1), Minor: number(-1), Access: "rwm"}
	rule := func(minor int64, allow bool) specs.LinuxDeviceCgroup {
		return specs.LinuxDeviceCgroup{Allow: allow, Type: "c", Major: number(1), Minor: number(minor), Access: "rwm"}
	}
	const zero, null = 5, 3 // minors
	for _, step := range []struct {
		rules      []specs.LinuxDeviceCgroup
		zero, null bool
	}{
		{[]specs.LinuxDeviceCgroup{deny, rule(zero, true)}, true, false},
		{[]specs.LinuxDeviceCgroup{deny, rule(zero, true), rule(null, true)}, true, true},
		{[]specs.LinuxDeviceCgroup{deny, rule(zero, true), rule(null, true), rule(zero, false)}, false, true},
	} {
		if err := replaceDeviceProgram(dir, step.rules); err != nil {
			t.Fatal(err)
		}
		if z, n := can("/dev/zero"), can("/dev/null"); z != step.zero || n != step.null {
			t.Errorf("after %d rules: zero %v, null %v; want %v, %v", len(step.rules), z, n, step.zero, step.null)
		}
	}
}
