// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// EnvBin names the directories of the programs under test, a path list as PATH
// is one.
const EnvBin = "GPUCKPT_BIN"

// ErrNoBins says that GPUCKPT_BIN is not set.
var ErrNoBins = errors.New(EnvBin + " is not set: it lists the directories of containerd, ctr, runc, criu, the shims and the workloads")

// Bins are the directories in which the programs under test lie: containerd,
// ctr, runc, criu, the shims, gpuckpt-cuda-helper, gpuckpt, gpuwork,
// softcuda/libcuda.so.1. The system's own directories are not searched for
// them, so that a test never runs a program of another version by accident.
type Bins struct {
	dirs []string
}

// FindBins reads GPUCKPT_BIN. A directory "criu" inside one of those listed is
// searched too: a bundle keeps CRIU there, beside its libraries.
//
// The error is ErrNoBins when the variable is not set.
func FindBins() (Bins, error) {
	list := os.Getenv(EnvBin)
	if list == "" {
		return Bins{}, ErrNoBins
	}
	return NewBins(filepath.SplitList(list)...)
}

// NewBins is FindBins with the directories given. Each must exist.
func NewBins(dirs ...string) (Bins, error) {
	var b Bins
	for _, dir := range dirs {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return Bins{}, fmt.Errorf("find the directory of programs %q: %w", dir, err)
		}
		info, err := os.Stat(abs)
		if err != nil {
			return Bins{}, fmt.Errorf("find the directory of programs: %w", err)
		}
		if !info.IsDir() {
			return Bins{}, fmt.Errorf("find the directory of programs: %s is no directory", abs)
		}
		b.dirs = append(b.dirs, abs)
		if info, err := os.Stat(filepath.Join(abs, "criu")); err == nil && info.IsDir() {
			b.dirs = append(b.dirs, filepath.Join(abs, "criu"))
		}
	}
	return b, nil
}

// Path returns the absolute path of a program or file, which may name a
// directory ("softcuda/libcuda.so.1"). The error is fs.ErrNotExist, and says
// where was searched.
func (b Bins) Path(name string) (string, error) {
	for _, dir := range b.dirs {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && !info.IsDir() {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s in %s: %w", name, strings.Join(b.dirs, ", "), os.ErrNotExist)
}

// SearchPath is a value for PATH: the directories, then the system's, where
// mount and the like are found.
func (b Bins) SearchPath() string {
	system := os.Getenv("PATH")
	if system == "" {
		system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	}
	return strings.Join(append(append([]string{}, b.dirs...), system), string(os.PathListSeparator))
}

// daemonPrograms are what a containerd's shims look for in $PATH, and beside themselves.
var daemonPrograms = []string{"containerd-shim-gpuckpt-v2", "gpuckpt-cuda-helper", "gpuckpt-tmpfs", "gpuckpt_criu.so", "libgpuckpt.so", "runc", "criu", "mount", "umount"}

// PathWithout fills an empty directory with the programs that a containerd's
// shims need, but for one: a value for PATH. They are copies, since what lies
// beside a program is found through a link.
func (b Bins) PathWithout(t T, dir, left string) string {
	t.Helper()
	for _, name := range daemonPrograms {
		if name == left {
			continue
		}
		program, err := b.Path(name)
		if err != nil {
			program, err = exec.LookPath(name)
		}
		var data []byte
		if err == nil {
			data, err = os.ReadFile(program)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), data, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// releasePrograms are a release's, by their places in it.
var releasePrograms = map[string]string{
	"bin/gpuckpt": "gpuckpt", "bin/containerd-shim-gpuckpt-v2": "containerd-shim-gpuckpt-v2", "bin/gpuckpt-cuda-helper": "gpuckpt-cuda-helper",
	"lib/gpuckpt/gpuckpt_criu.so": "gpuckpt_criu.so", "lib/gpuckpt/gpuckpt-tmpfs": "gpuckpt-tmpfs", "lib/gpuckpt/libgpuckpt.so": "libgpuckpt.so", "lib/gpuckpt/criu/criu": "criu",
}

// Release returns the files of a release, paths by their places in it. CRIU's libraries are among them
// where they lie beside it, as in a bundle.
func (b Bins) Release() (map[string]string, error) {
	files := make(map[string]string)
	for place, name := range releasePrograms {
		path, err := b.Path(name)
		if err != nil {
			return nil, err
		}
		files[place] = path
	}
	const criu = "lib/gpuckpt/criu"
	libraries, err := filepath.Glob(filepath.Join(filepath.Dir(files[criu+"/criu"]), "lib", "*"))
	for _, path := range libraries {
		files[criu+"/lib/"+filepath.Base(path)] = path
	}
	return files, err
}

// OlderContainerds are the versions of containerd beside the newest that are
// supported: the first starts shims in the way of those before 2.3.
var OlderContainerds = []string{"2.2", "2.3"}

// WithContainerd gives the programs with the containerd of a version, "2.2", and its
// ctr in the place of the newest, by links in a directory, which must exist. The
// error is fs.ErrNotExist where they are not there.
func (b Bins) WithContainerd(version, dir string) (Bins, error) {
	for _, program := range []string{"containerd", "ctr"} {
		path, err := b.Path(program + "-" + version)
		if err == nil {
			err = os.Symlink(path, filepath.Join(dir, program))
		}
		if err != nil {
			return Bins{}, fmt.Errorf("use containerd %s: %w", version, err)
		}
	}
	return NewBins(append([]string{dir}, b.dirs...)...)
}

// WithFaults gives the programs with the shim and the command line in the place of the released
// ones that stop at each step where a test wants it (make build-faults).
func (b Bins) WithFaults() (Bins, error) {
	shim, err := b.Path("faults/containerd-shim-gpuckpt-v2")
	if err != nil {
		return Bins{}, fmt.Errorf("%w: run make build-faults", err)
	}
	return NewBins(append([]string{filepath.Dir(shim)}, b.dirs...)...)
}

// Before gives the programs with those of a directory first.
func (b Bins) Before(dir string) (Bins, error) {
	return NewBins(append([]string{dir}, b.dirs...)...)
}
