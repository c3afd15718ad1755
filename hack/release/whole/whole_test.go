// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package whole tests a release as its users get it: what `make release` wrote, on clean roots. It
// needs root. `make test-release` builds the release first.
package whole

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// What the release is of; make sets them.
var (
	dist    = os.Getenv("GPUCKPT_DIST")
	version = os.Getenv("GPUCKPT_VERSION")
	public  = os.Getenv("GPUCKPT_PUBLIC_KEY")
)

func TestMain(m *testing.M) {
	if dist == "" || version == "" || public == "" {
		fmt.Fprintln(os.Stderr, "GPUCKPT_DIST, GPUCKPT_VERSION and GPUCKPT_PUBLIC_KEY are not set: run make test-release")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// run runs a command and returns what it prints.
func run(t *testing.T, dir string, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// clean returns a root of its own for a test.
func clean(t *testing.T) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	// Only the last line is the path: a first run tells what it does.
	lines := strings.Split(strings.TrimSpace(run(t, "..", "./clean-root")), "\n")
	run(t, "", "cp", "-a", lines[len(lines)-1], root)
	return root
}

// in runs a shell command in a root.
func in(t *testing.T, root, command string) string {
	t.Helper()
	return run(t, "", "./in-root", root, dist, command)
}

// files are the paths in a root, without the records of package managers and logs.
func files(t *testing.T, root string) map[string]bool {
	t.Helper()
	records := regexp.MustCompile(`^/(var/lib/(apt|dpkg|rpm)|var/log|var/cache|dist|etc/ld\.so\.cache)(/|$)`)
	found := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if path = strings.TrimPrefix(path, root); err == nil && !records.MatchString(path) {
			found[path] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func nothingLeft(t *testing.T, root string, before map[string]bool) {
	t.Helper()
	after := files(t, root)
	for path := range after {
		if !before[path] {
			t.Errorf("left: %s", path)
		}
	}
	for path := range before {
		if !after[path] {
			t.Errorf("gone: %s", path)
		}
	}
}

func says(t *testing.T, out string, words ...string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(out, word) {
			t.Errorf("no %q in:\n%s", word, out)
		}
	}
}

const versions = `for program in gpuckpt containerd-shim-gpuckpt-v2 gpuckpt-cuda-helper; do $program --version; done; `

// From the packages alone, on a clean Debian: every program says its version, CRIU is there, the
// demo counts on, and the removal leaves nothing.
func TestDeb(t *testing.T) {
	root := clean(t)
	before := files(t, root)
	out := in(t, root, `dpkg -i /dist/gpuckpt_*_amd64.deb /dist/gpuckpt-demo_*_amd64.deb; `+versions+`/usr/lib/gpuckpt/criu/criu --version; gpuckpt demo; dpkg -P gpuckpt-demo gpuckpt`)
	says(t, out, "gpuckpt "+version+", commit ", "containerd-shim-gpuckpt-v2 "+version+", ", "gpuckpt-cuda-helper "+version+", ", "Version: 4.2", "counter before: 101, after restore: 102")
	nothingLeft(t, root, before)
}

// block returns the commands of a section of docs/install.md.
func block(t *testing.T, heading string) string {
	t.Helper()
	text, err := os.ReadFile("../../../docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(text), "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var lines []string
	for _, match := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(section, -1) {
		lines = append(lines, match[1])
	}
	if !found || len(lines) == 0 {
		t.Fatalf("docs/install.md has no commands below %q", heading)
	}
	return strings.ReplaceAll(strings.Join(lines, ""), "VERSION", version)
}

// The commands of docs/install.md, one section after the other, on a clean Debian. No containerd
// runs there to be restarted, and no network is needed.
func TestDocument(t *testing.T) {
	root := clean(t)
	before := files(t, root)
	script := "cp /dist/* /tmp; cd /tmp\n"
	for _, heading := range []string{"Any other Linux", "Uninstall", "Debian and Ubuntu", "Uninstall"} {
		commands := block(t, heading)
		if heading == "Uninstall" && strings.Contains(script, "gpuckpt-demo") == false {
			commands, _, _ = strings.Cut(commands, "apt-get") // nothing is there to purge yet
		}
		script += commands
	}
	out := in(t, root, script)
	says(t, out, "installed gpuckpt "+version, "uninstalled gpuckpt", "counter before: 101, after restore: 102")
	nothingLeft(t, root, before)
	run(t, dist, "sh", "-exc", "cp "+public+" gpuckpt.pub\ntrap 'rm gpuckpt.pub' EXIT\n"+block(t, "Check what you downloaded"))
}

// The archives do the same by their own installer.
func TestArchive(t *testing.T) {
	root := clean(t)
	before := files(t, root)
	out := in(t, root, `for a in /dist/gpuckpt-*-linux-amd64.tar.gz; do tar -C /tmp -xzf $a; done; cp -a /tmp/gpuckpt-demo-*/. /tmp/gpuckpt-`+version+`-linux-amd64/
/tmp/gpuckpt-`+version+`-linux-amd64/bin/gpuckpt install --without-containerd; `+versions+`/tmp/gpuckpt-`+version+`-linux-amd64/bin/gpuckpt demo; gpuckpt uninstall`)
	says(t, out, "installed gpuckpt "+version+" in /usr/local", "gpuckpt-cuda-helper "+version, "after restore: 102", "uninstalled gpuckpt")
	nothingLeft(t, root, before)
}

// The programs for arm64 run in emulation, install themselves and leave nothing. Of gpuckpt, what makes
// no checkpoint: emulation has neither ptrace nor CRIU. make test-arm64 runs unit tests so.
func TestArm64(t *testing.T) {
	dir, root := t.TempDir(), t.TempDir()
	run(t, dir, "tar", "-xzf", filepath.Join(dist, "gpuckpt-"+version+"-linux-arm64.tar.gz"))
	emulated := func(program string, args ...string) string {
		t.Helper()
		program = "gpuckpt-" + version + "-linux-arm64/bin/" + program
		return run(t, dir, "qemu-aarch64-static", append([]string{"-L", "/usr/aarch64-linux-gnu", program}, args...)...)
	}
	before := files(t, root)
	for _, program := range []string{"gpuckpt", "containerd-shim-gpuckpt-v2", "gpuckpt-cuda-helper"} {
		says(t, emulated(program, "--version"), program+" "+version+", commit ", "linux/arm64")
	}
	says(t, emulated("gpuckpt", "install", "--without-containerd", "--root", root), "installed gpuckpt "+version)
	for _, name := range []string{"bin/gpuckpt", "lib/gpuckpt/gpuckpt_criu.so", "lib/gpuckpt/gpuckpt-tmpfs"} {
		says(t, run(t, "", "readelf", "--file-header", filepath.Join(root, "usr/local", name)), "AArch64")
	}
	says(t, emulated("gpuckpt", "uninstall", "--root", root), "uninstalled gpuckpt")
	nothingLeft(t, root, before)
}

// The rpm installs and erases; its database is the test's.
func TestRpm(t *testing.T) {
	root := clean(t)
	before := files(t, root)
	packages, err := filepath.Glob(filepath.Join(dist, "gpuckpt-*.x86_64.rpm"))
	if err != nil || len(packages) != 2 {
		t.Fatal(packages, err)
	}
	run(t, "", "rpm", append([]string{"--root", root, "--dbpath", "/var/lib/rpm", "--nodeps", "--install"}, packages...)...)
	says(t, in(t, root, versions), "gpuckpt "+version, "gpuckpt-cuda-helper "+version)
	says(t, run(t, "", "rpm", "--root", root, "--dbpath", "/var/lib/rpm", "--query", "--requires", "gpuckpt"), "glibc >= 2.")
	run(t, "", "rpm", "--root", root, "--dbpath", "/var/lib/rpm", "--erase", "gpuckpt-demo", "gpuckpt")
	nothingLeft(t, root, before)
}

// The package takes the runtime out of containerd's configuration when it is removed.
func TestDebUndoesContainerd(t *testing.T) {
	root := clean(t)
	before := files(t, root)
	in(t, root, `dpkg -i /dist/gpuckpt_*_amd64.deb; tar -C /tmp -xzf /dist/gpuckpt-demo-*.tar.gz
gpuckpt install --containerd /tmp/gpuckpt-demo-`+version+`-linux-amd64/lib/gpuckpt/demo/containerd
grep -q runtime_path.*/usr/bin/containerd-shim-gpuckpt-v2 /etc/containerd/conf.d/gpuckpt.toml; dpkg -P gpuckpt`)
	nothingLeft(t, root, before)
}

// The image is a valid layout of both architectures.
func TestImage(t *testing.T) {
	dir := t.TempDir()
	run(t, dir, "tar", "-xf", filepath.Join(dist, "gpuckpt-node-"+version+".oci.tar"))
	path, err := layout.FromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	index, err := path.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	says(t, run(t, dir, "sh", "-c", "cat blobs/sha256/* | grep -a architecture"), "amd64", "arm64")
}

// The same commit built elsewhere gives the same bytes.
func TestSameBytes(t *testing.T) {
	source, again := t.TempDir(), filepath.Join(t.TempDir(), "dist")
	top := strings.TrimSpace(run(t, "", "git", "rev-parse", "--show-toplevel"))
	commit := strings.TrimSpace(run(t, "", "git", "rev-parse", "HEAD"))
	epoch := strings.TrimSpace(run(t, "", "git", "log", "-1", "--format=%ct"))
	run(t, top, "sh", "-ec", `git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- -cf - | tar -C `+source+` -xf -`)
	if run(t, top, "git", "status", "--porcelain") != "" {
		commit += "-dirty"
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(source, "hack/release/build"), version, again)
	cmd.Env = append(os.Environ(), "COMMIT="+commit, "SOURCE_DATE_EPOCH="+epoch)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	compared := 0
	for path := range files(t, again) {
		a, err := os.ReadFile(again + path)
		b, berr := os.ReadFile(dist + path)
		if path == "" {
			continue
		}
		if err != nil || berr != nil || sha256.Sum256(a) != sha256.Sum256(b) {
			t.Errorf("%s differs: %v, %v", path, err, berr)
		}
		compared++
	}
	if compared < 12 {
		t.Errorf("only %d files were compared", compared)
	}
}
