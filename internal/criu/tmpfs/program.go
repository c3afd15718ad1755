// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package tmpfs

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/tarname"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

// The name that CRIU calls, and files beside it: what Main is to do, and the note that it has
// carried what is mounted from outside.
const (
	program  = "tar"
	settings = "tmpfs.json"
	carried  = "carried"
)

// ProgramName is the file name of the program that CRIU runs as tar. One start of it takes 2 ms of
// processor time, and one of the shim 6 ms.
const ProgramName = "gpuckpt-tmpfs"

// task is what Main is to do beside what CRIU asks for.
type task struct {
	// Shm is the directory of the host that is mounted at /dev/shm; "" for none.
	Shm string `json:"shm,omitempty"`
	// Images is the directory of the checkpoint.
	Images string `json:"images,omitempty"`
}

// Programs returns the directory that Install makes.
func Programs(containerBundle string) string { return filepath.Join(containerBundle, "criu-path") }

// Install makes the directory that is to come first in CRIU's $PATH, anew for each run of CRIU. It
// lies in the container's bundle, whose spec says what is mounted from outside. images is the
// directory of the checkpoint.
func Install(containerBundle, images string) (dir string, err error) {
	spec, err := readSpec(containerBundle)
	if err != nil {
		return "", err
	}
	self, err := Program()
	if err != nil {
		return "", err
	}
	dir = Programs(containerBundle)
	text, err := json.Marshal(task{Shm: outsideShm(spec), Images: images})
	if err == nil {
		err = os.RemoveAll(dir)
	}
	if err == nil {
		err = os.Mkdir(dir, 0o755) // a user namespace's root looks into it
	}
	if err == nil {
		err = os.Symlink(self, filepath.Join(dir, program))
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, settings), text, 0o644)
	}
	if err != nil {
		return "", fmt.Errorf("set up what saves a tmpfs: %w", err)
	}
	return dir, nil
}

// Program returns the path of the program that Install makes CRIU's tar, see version.Beside. Without it this
// program is its own tar, if it is the shim.
func Program() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this program: %w", err)
	}
	if path, err := version.Beside(self, ProgramName); err == nil {
		return path, nil
	}
	return self, nil
}

// readSpec reads the spec of a bundle. Package bundle does that too: it brings packages that Main
// would wait for.
func readSpec(bundle string) (*specs.Spec, error) {
	text, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return nil, fmt.Errorf("read the container's spec: %w", err)
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(text, spec); err != nil {
		return nil, fmt.Errorf("read the container's spec: %w", err)
	}
	return spec, nil
}

// The shim is this program where there is none beside it. Then it does not wait until all packages
// have set themselves up, a third of its time: this one imports little, and its turn comes early.
func init() {
	if IsProgram() {
		Main()
	}
}

// IsProgram reports whether this process was started by CRIU as `tar`.
func IsProgram() bool { return len(os.Args) > 1 && os.Args[0] == program }

// Main does what CRIU asks `tar` for, and ends the program. At a dump standard input is the mount's
// root and standard output the image; at a restore standard input is the image. CRIU's log gets
// standard error.
func Main() {
	if err := run(os.Args[1:]); err != nil {
		// "Error (" is what CRIU's errors begin with.
		fmt.Fprintf(os.Stderr, "Error (gpuckpt tmpfs): %s\n", visible.Text(err.Error())) // a line of CRIU's log
		os.Exit(1)
	}
	os.Exit(0)
}

func run(args []string) error {
	unix.Umask(0)
	at := slices.Index(args, "--directory")
	if at < 0 || at+1 >= len(args) {
		return fmt.Errorf("%q: CRIU asks for something unknown; report it with CRIU's version", args)
	}
	dir, err := os.Open(args[at+1])
	if err != nil {
		return err
	}
	defer dir.Close()
	switch {
	case slices.Contains(args, "--create"):
		if err := Save(dir, os.Stdout); err != nil {
			return err
		}
		return beside(saveShm)
	case slices.Contains(args, "--extract"):
		if err := beside(loadShm); err != nil {
			return err
		}
		return Load(os.Stdin, dir, false)
	}
	return fmt.Errorf("%q: CRIU asks for something unknown; report it with CRIU's version", args)
}

// beside carries what is mounted at /dev/shm from outside, once in a run of CRIU.
func beside(carry func(shm, images *os.File) error) error {
	self, err := exec.LookPath(program)
	if err != nil {
		return err
	}
	home := filepath.Dir(self)
	text, err := os.ReadFile(filepath.Join(home, settings))
	if err != nil {
		return err
	}
	var todo task
	if err := json.Unmarshal(text, &todo); err != nil {
		return fmt.Errorf("%s: %w", filepath.Join(home, settings), err)
	}
	if todo.Shm == "" {
		return nil
	}
	note, err := os.OpenFile(filepath.Join(home, carried), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	note.Close()
	shm, err := os.Open(todo.Shm)
	if err != nil {
		return err
	}
	defer shm.Close()
	images, err := os.Open(todo.Images)
	if err != nil {
		return err
	}
	defer images.Close()
	if err := carry(shm, images); err != nil {
		return fmt.Errorf("%s: %w", ShmPath, err)
	}
	return nil
}

func saveShm(shm, images *os.File) error {
	image, err := openAt(images, ShmImage, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC)
	if err != nil {
		return err
	}
	return cmp.Or(Save(shm, image), image.Close())
}

// loadShm restores the content, if the checkpoint has any.
func loadShm(shm, checkpoint *os.File) error {
	image, err := openAt(checkpoint, ShmImage, unix.O_RDONLY|unix.O_NONBLOCK)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if errors.Is(err, unix.ELOOP) {
		return fmt.Errorf("%w: %s is a symbolic link", tarname.ErrDamaged, ShmImage)
	}
	if err != nil {
		return err
	}
	defer image.Close()
	return Load(image, shm, true)
}

func openAt(dir *os.File, name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}
