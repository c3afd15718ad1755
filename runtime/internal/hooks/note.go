// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hooks

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Note is the content of the file /run/gpuckpt/restored in a container that was restored: JSON.
type Note struct {
	// Restores is how often the program was restored.
	Restores int `json:"restores"`
	// ID is another one after each restore, 32 random hexadecimal digits.
	ID string `json:"id"`
	// Time is when it was restored.
	Time time.Time `json:"time"`
}

// The parts of the file's path. In CRI and nerdctl /run is a directory of the image's; ctr mounts
// a tmpfs there.
const (
	run      = "run"
	noteDir  = "gpuckpt"
	noteName = "restored"
)

// maxNote bounds what is read of an earlier note, which the program may have changed.
const maxNote = 4096

// WriteNote writes the note of one more restore into a container, by one of its processes and its
// bundle. It refuses to write into a volume. On an error the note is as it was.
func WriteNote(pid int, bundleDir string) (Note, error) {
	file, err := bundle.Read(bundleDir)
	if err != nil {
		return Note{}, err
	}
	rootfs := bundle.RootOf(bundleDir, file.Spec)
	spec, _ := bundle.AtPlaces(file.Spec, rootfs)
	note, err := writeNote(fmt.Sprintf("/proc/%d/root", pid), spec)
	if errors.Is(err, unix.EROFS) {
		// The same file system without the container's mounts, where it is not read-only.
		note, err = writeNote(rootfs, nil)
	}
	if err != nil {
		err = fmt.Errorf("tell the program of its restore: %w", err)
	}
	return note, err
}

// writeNote writes it below one root. spec has the mounts below it, nil for none.
func writeNote(root string, spec *specs.Spec) (Note, error) {
	top, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Note{}, &os.PathError{Op: "open", Path: root, Err: err}
	}
	defer unix.Close(top)
	above, err := openDir(top, run, unix.RESOLVE_IN_ROOT|unix.RESOLVE_NO_MAGICLINKS)
	if err != nil {
		return Note{}, err
	}
	defer unix.Close(above)
	ours, err := sameMount(top, above)
	if err != nil {
		return Note{}, err
	}
	if !ours && (spec == nil || !slices.ContainsFunc(spec.Mounts, isRun)) {
		return Note{}, fmt.Errorf("/%s is on a volume", run)
	}
	// Not through a link, nor to another mount: the image's author chose what is there.
	dir, err := openDir(above, noteDir, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_XDEV)
	if err != nil {
		return Note{}, err
	}
	defer unix.Close(dir)
	note := Note{Restores: readNote(dir).Restores + 1, ID: newID(), Time: time.Now().UTC()}
	data, err := json.Marshal(note)
	if err != nil {
		return Note{}, err
	}
	return note, replace(dir, append(data, '\n'))
}

// RemoveNote removes what the image of a container has of an earlier restore: the container is created,
// does not run yet, and will start from the beginning. It is an error if it stays.
func RemoveNote(bundleDir string) error {
	file, err := bundle.Read(bundleDir)
	if err != nil {
		return err
	}
	if err := removeNote(bundle.RootOf(bundleDir, file.Spec)); err != nil {
		return fmt.Errorf("remove an earlier note: %w", err)
	}
	return nil
}

// removeNote removes it below one root, and nothing that is mounted there.
func removeNote(root string) error {
	top, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(top)
	dir, err := proc.Openat2(top, run+"/"+noteDir, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err == nil {
		defer unix.Close(dir)
		err = unix.Unlinkat(dir, noteName, 0)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// isRun reports whether a mount is the container's own tmpfs at /run.
func isRun(m specs.Mount) bool { return m.Type == "tmpfs" && path.Clean(m.Destination) == "/"+run }

// openDir opens a directory, and makes it where there is none.
func openDir(at int, name string, resolve uint64) (int, error) {
	how := &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: resolve}
	fd, err := proc.Openat2(at, name, how)
	if errors.Is(err, unix.ENOENT) {
		if err = unix.Mkdirat(at, name, 0o755); err == nil {
			if fd, err = proc.Openat2(at, name, how); err == nil {
				err = unix.Fchmod(fd, 0o755) // whatever the umask is
			}
		}
	}
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}

// sameMount reports whether two open files are in the same mount.
func sameMount(a, b int) (bool, error) {
	var ids [2]uint64
	for i, fd := range []int{a, b} {
		var st unix.Statx_t
		if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
			return false, fmt.Errorf("look at a mount: %w", err)
		}
		ids[i] = st.Mnt_id
	}
	return ids[0] == ids[1], nil
}

// readNote returns the note of an earlier restore; an empty one where there is none to be read.
func readNote(dir int) (note Note) {
	fd, err := unix.Openat(dir, noteName, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return note
	}
	defer unix.Close(fd)
	// A program that may make nodes has any device of the host's opened here, and one that writes to a FIFO is waited for.
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return note
	}
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return note
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxNote))
	if err != nil || json.Unmarshal(data, &note) != nil || note.Restores < 0 || note.Restores >= 1<<30 {
		return Note{}
	}
	return note
}

// replace makes a file of this content the note.
func replace(dir int, data []byte) error {
	const next = ".restored"
	if err := unix.Unlinkat(dir, next, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "unlink", Path: next, Err: err}
	}
	fd, err := unix.Openat(dir, next, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return &os.PathError{Op: "open", Path: next, Err: err}
	}
	f := os.NewFile(uintptr(fd), next)
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(0o444) // whatever the umask is
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = unix.Renameat(dir, next, dir, noteName)
	}
	return err
}

func newID() string {
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails
	return hex.EncodeToString(id)
}
