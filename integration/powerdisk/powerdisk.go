// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package powerdisk is a disk of which every write and every flush is remembered, so that a test can
// have it as it would be had the power been lost at any of the flushes. It can also be told to break:
// then the block device below the file system fails to read or to write.
//
// The life of a Disk: Make makes a file system and mounts it. Whoever writes there does so through
// the kernel's own ext4, a loop device, and a file that this process serves by FUSE and which keeps
// what comes. Stop ends that. Then Crashes tells of each flush, and At makes the disk as it was then.
package powerdisk

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// event is a write, or a flush if there are no data.
type event struct {
	off  int64
	data []byte
}

// Disk is one disk.
type Disk struct {
	// Dir is where the file system is mounted, until Stop.
	Dir string

	dir    string // of all files
	size   int64
	server *fuse.Server

	mu     sync.Mutex
	now    *os.File // what has been written
	events []event
	ended  bool
	broken Broken
	failed int // reads, writes and flushes
}

// Broken is what the block device fails to do.
type Broken int

// What a Disk may fail to do: any of these bits.
const (
	Reads Broken = 1 << iota
	Writes
)

// Break has the block device fail from now on, with "input/output error", or mends it: 0. What the
// kernel has of it in memory stays. A file system whose journal could not be written takes no writes
// until it is mounted again.
func (d *Disk) Break(what Broken) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.broken = what
}

// Failed returns how often the block device has failed.
func (d *Disk) Failed() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed
}

// fails reports whether the block device is to fail now. The mutex is held.
func (d *Disk) fails(what Broken) bool {
	if d.broken&what != 0 {
		d.failed++
	}
	return d.broken&what != 0
}

// Make makes a disk of so many bytes, in a directory of the caller's.
func Make(dir string, size int64) (_ *Disk, err error) {
	d := &Disk{Dir: filepath.Join(dir, "mounted"), dir: dir, size: size}
	served := filepath.Join(dir, "served")
	if err := errors.Join(os.Mkdir(d.Dir, 0o700), os.Mkdir(served, 0o700)); err != nil {
		return nil, err
	}
	if d.now, err = os.Create(filepath.Join(dir, "now")); err != nil {
		return nil, err
	}
	if err := d.now.Truncate(size); err != nil {
		return nil, err
	}
	if err := run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.now.Name()); err != nil {
		return nil, err
	}
	if err := run("cp", "--sparse=always", d.now.Name(), d.base()); err != nil {
		return nil, err
	}
	// What is unmounted below a mount that is shared is so in all mount namespaces that were made
	// meanwhile, those of containers and of restores.
	if err := errors.Join(unix.Mount(dir, dir, "", unix.MS_BIND, ""), unix.Mount("", dir, "", unix.MS_SHARED, "")); err != nil {
		return nil, err
	}
	d.server, err = fs.Mount(served, &root{disk: d}, &fs.Options{MountOptions: fuse.MountOptions{DirectMount: true, FsName: "powerdisk"}})
	if err != nil {
		return nil, fmt.Errorf("serve the disk: %w", err)
	}
	if err := run("mount", "-t", "ext4", "-o", "loop,nodiscard", filepath.Join(served, "disk"), d.Dir); err != nil {
		return nil, errors.Join(err, d.unmount())
	}
	return d, nil
}

func (d *Disk) base() string { return filepath.Join(d.dir, "base") }

// Events returns how many writes and flushes there have been.
func (d *Disk) Events() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.events)
}

// Stop remembers nothing more, and unmounts.
func (d *Disk) Stop() error {
	d.mu.Lock()
	ended := d.ended
	d.ended = true
	d.mu.Unlock()
	if ended {
		return nil
	}
	return errors.Join(run("umount", d.Dir), d.unmount(), d.now.Close(), unix.Unmount(d.dir, unix.MNT_DETACH))
}

// Look mounts the disk as Stop has left it, and calls look with the directory.
func (d *Disk) Look(look func(dir string) error) error {
	dir, err := os.MkdirTemp(d.dir, "look")
	if err != nil {
		return err
	}
	if err := run("mount", "-t", "ext4", "-o", "loop", d.now.Name(), dir); err != nil {
		return err
	}
	return errors.Join(look(dir), run("umount", dir))
}

// unmount ends the serving. The loop device keeps its file open for as long as some mount namespace,
// that of a container which is just being made for one, has a copy of the mount: minutes, where the
// tests of another containerd have runc or CRIU hang meanwhile.
func (d *Disk) unmount() (err error) {
	for deadline := time.Now().Add(3 * time.Minute); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if err = d.server.Unmount(); err == nil {
			break
		}
	}
	return err
}

// Crashes returns the flushes up to an event, by their numbers, and that event: the power may be lost
// right after each.
func (d *Disk) Crashes(until int) (at []int) {
	for i, e := range d.events[:until] {
		if e.data == nil {
			at = append(at, i)
		}
	}
	return append(at, until-1)
}

// At mounts the disk as it is after a loss of power behind an event, and before the next flush, and
// calls look with the directory. Of what was written and not flushed a part is on the disk, any part:
// lost chooses, 0 for none of it.
func (d *Disk) At(crash int, lost uint64, look func(dir string) error) (err error) {
	// A place of its own each time: a mount namespace that is just being made for a container can
	// have the last one mounted for a while, and a second mount of one file is the first one's.
	place, err := os.MkdirTemp(d.dir, "crashed")
	if err != nil {
		return err
	}
	image, dir := filepath.Join(place, "disk"), filepath.Join(place, "look")
	if err := run("cp", "--sparse=always", d.base(), image); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(image)) }()
	f, err := os.OpenFile(image, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	flushed, next := -1, len(d.events)
	for i, e := range d.events {
		if e.data == nil && i <= crash {
			flushed = i
		} else if e.data == nil {
			next = i
			break
		}
	}
	chance := rand.New(rand.NewPCG(lost, uint64(crash))) //nolint:gosec // the same in each run
	for i, e := range d.events {
		if e.data == nil || i > flushed && (lost == 0 || i > next || chance.IntN(2) == 0) {
			continue
		}
		if _, werr := f.WriteAt(e.data, e.off); werr != nil {
			err = errors.Join(err, werr)
		}
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := run("mount", "-t", "ext4", "-o", "loop", image, dir); err != nil {
		return err
	}
	return errors.Join(look(dir), run("umount", dir))
}

func run(program string, args ...string) error {
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, out)
	}
	return nil
}

// root is the directory that is served. It has one file, the disk.
type root struct {
	fs.Inode
	disk *Disk
}

func (r *root) OnAdd(ctx context.Context) {
	r.AddChild("disk", r.NewPersistentInode(ctx, &file{disk: r.disk}, fs.StableAttr{Mode: unix.S_IFREG}), true)
}

type file struct {
	fs.Inode
	disk *Disk
}

var (
	_ = fs.NodeOnAdder((*root)(nil))
	_ = fs.NodeOpener((*file)(nil))
	_ = fs.NodeGetattrer((*file)(nil))
	_ = fs.NodeReader((*file)(nil))
	_ = fs.NodeWriter((*file)(nil))
	_ = fs.NodeFsyncer((*file)(nil))
)

func (f *file) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, 0
}

func (f *file) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode, out.Size = unix.S_IFREG|0o600, uint64(f.disk.size)
	return 0
}

func (f *file) Read(_ context.Context, _ fs.FileHandle, to []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	f.disk.mu.Lock()
	fails := f.disk.fails(Reads)
	f.disk.mu.Unlock()
	if fails {
		return nil, syscall.EIO
	}
	n, err := f.disk.now.ReadAt(to, off)
	if err != nil && n == 0 {
		return nil, syscall.EIO
	}
	return fuse.ReadResultData(to[:n]), 0
}

func (f *file) Write(_ context.Context, _ fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	d := f.disk
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fails(Writes) {
		return 0, syscall.EIO
	}
	if _, err := d.now.WriteAt(data, off); err != nil {
		return 0, syscall.EIO
	}
	if !d.ended && len(data) > 0 {
		d.events = append(d.events, event{off, append([]byte(nil), data...)})
	}
	return uint32(len(data)), 0
}

func (f *file) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	d := f.disk
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fails(Writes) {
		return syscall.EIO
	}
	if !d.ended {
		d.events = append(d.events, event{})
	}
	return 0
}
