// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/cli/installcmd/install"
)

const config = "/etc/containerd/config.toml"

// configurations are those that nodes have, and words of containerd's own dump that must stay.
var configurations = map[string]struct{ text, stays string }{
	"none":       {"", "max_container_log_line_size = 16384"},
	"version 2":  {"version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  max_container_log_line_size = 4242\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n  SystemdCgroup = true\n", "max_container_log_line_size = 4242"},
	"version 3":  {"version = 3\n[plugins.'io.containerd.cri.v1.runtime']\n  max_container_log_line_size = 4242\n", "max_container_log_line_size = 4242"},
	"no imports": {"version = 3\nimports = []\n[plugins.'io.containerd.cri.v1.runtime']\n  max_container_log_line_size = 4242\n", "max_container_log_line_size = 4242"},
	"others":     {"version = 3\nimports = [\"/etc/containerd/other.toml\"]\n", "max_container_log_line_size = 4343"},
}

// node makes the root of a node with a containerd of a version.
func node(t *testing.T, version, text string) string {
	t.Helper()
	use := bins
	if version != "2.4" {
		if os.Getenv("GPUCKPT_SOURCE") != "" {
			t.Skip("older containerds are not in the bundle")
		}
		var err error
		if use, err = bins.WithContainerd(version, t.TempDir()); err != nil {
			t.Fatalf("%v; run `make setup-kubernetes`", err)
		}
	}
	program, err := use.Path("containerd")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	copyFile(t, program, filepath.Join(root, "usr/bin/containerd"), "")
	if err := os.MkdirAll(filepath.Join(root, "etc/containerd"), 0o755); err != nil {
		t.Fatal(err)
	}
	other := "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\n  max_container_log_line_size = 4343\n"
	if err := os.WriteFile(filepath.Join(root, "etc/containerd/other.toml"), []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	if text != "" {
		if err := os.WriteFile(filepath.Join(root, config), []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// dump is containerd's own view of its configuration, in a root.
func dump(t *testing.T, root string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/usr/bin/containerd", "--config", config, "config", "dump")
	cmd.SysProcAttr, cmd.Dir = &syscall.SysProcAttr{Chroot: root}, "/"
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// Each supported containerd, with each configuration that nodes have, knows the runtime after the
// installation and keeps all else; a second run changes nothing; nothing is left after the removal.
func TestContainerds(t *testing.T) {
	dir := release(t, "")
	for _, version := range append([]string{"2.4"}, harness.OlderContainerds...) {
		for name, c := range configurations {
			t.Run(version+" "+name, func(t *testing.T) {
				root := node(t, version, c.text)
				before, was := files(t, root), dump(t, root)
				r, err := gpuckpt(t, dir, nil, "install", "--root", root)
				if err != nil {
					t.Fatal(err)
				}
				now := dump(t, root)
				shim := "/usr/local/bin/" + install.ShimName
				if !r.Restart || r.Prefix != "/usr/local" || !strings.Contains(now, "runtime_path = '"+shim+"'") || !strings.Contains(now, c.stays) {
					t.Errorf("%+v: %s", r, now)
				}
				if systemd := strings.Count(was, "SystemdCgroup = true"); strings.Count(now, "SystemdCgroup = true") != 2*systemd {
					t.Errorf("the runtime's SystemdCgroup is not runc's: %s", now)
				}
				if r, err = gpuckpt(t, dir, nil, "install", "--root", root); err != nil || len(r.Changed) != 0 || r.Restart {
					t.Errorf("a second time: %+v, %v", r, err)
				}
				if _, err := gpuckpt(t, dir, nil, "uninstall", "--root", root); err != nil {
					t.Error(err)
				}
				same(t, "removed", files(t, root), before)
				if again := dump(t, root); again != was {
					t.Errorf("containerd's configuration was\n%s\nand is\n%s", was, again)
				}
			})
		}
	}
}

var comments = regexp.MustCompile(` *#.*`)

// A tool that writes containerd's configuration anew, as some do, adds to it, drops comments and quotes otherwise. What it
// has added outlives gpuckpt, whose next installation and removal leave a containerd that starts.
func TestWrittenAnewByOthers(t *testing.T) {
	dir := release(t, "")
	for _, name := range []string{"none", "no imports", "others"} {
		t.Run(name, func(t *testing.T) {
			root := node(t, "2.4", configurations[name].text)
			if _, err := gpuckpt(t, dir, nil, "install", "--root", root); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(root, config)
			text, err := os.ReadFile(path)
			if err == nil {
				err = os.WriteFile(path, append(comments.ReplaceAll(bytes.ReplaceAll(text, []byte(`"`), []byte("'")), nil), "\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]\n  runtime_path = '/usr/bin/nvidia'\n"...), 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, command := range []string{"install", "uninstall"} {
				if _, err := gpuckpt(t, dir, nil, command, "--root", root); err != nil {
					t.Fatal(err)
				}
				if now := dump(t, root); !strings.Contains(now, "/usr/bin/nvidia") || strings.Contains(now, install.ShimName) != (command == "install") {
					t.Errorf("after %s: %s", command, now)
				}
			}
			if text, err = os.ReadFile(path); err != nil {
				t.Fatal(err)
			}
			for _, imported := range regexp.MustCompile(`/etc/containerd/[^']*`).FindAllString(string(text), -1) {
				if found, err := filepath.Glob(filepath.Join(root, imported)); err != nil || len(found) == 0 && !strings.Contains(imported, "*") {
					t.Errorf("containerd does not start without %s, %v", imported, err)
				}
			}
		})
	}
}

// What cannot be configured stays as it was: a configuration that containerd does not read, a
// restart that fails, an import that would lose settings.
func TestFailureHalfWay(t *testing.T) {
	dir := release(t, "")
	const good = "version = 3\nimports = []\n"
	for _, c := range []struct {
		name, text, command string
		words               []string
	}{
		{"a configuration that is damaged", "version = 3\n[plugins", "", []string{"configure containerd"}},
		{"a restart that fails", good, "exit 3", []string{"restart containerd", "exit status 3"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := node(t, "2.4", c.text)
			shell(t, root)
			before := files(t, filepath.Join(root, "etc"))
			args := []string{"install", "--root", root}
			if c.command != "" {
				args = append(args, "--restart", "--restart-command", c.command)
			}
			_, err := gpuckpt(t, dir, nil, args...)
			harness.Says(t, err, c.words...)
			same(t, "refused", files(t, filepath.Join(root, "etc")), before)
			if left := files(t, filepath.Join(root, "usr/local")); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// shell puts the host's /bin/sh into a root.
func shell(t *testing.T, root string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ldd", "/bin/sh").Output()
	if err != nil {
		t.Fatal(err)
	}
	copyFile(t, "/bin/sh", filepath.Join(root, "bin/sh"), "")
	for field := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(field, "/") {
			copyFile(t, field, filepath.Join(root, field), "")
		}
	}
}
