// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// Whatever one of a dump's images says, comparing it ends with an answer. An open file that is let through is one
// that a container without capabilities can have.
func FuzzImages(f *testing.F) {
	dir, spec := zoo(f)
	spec.Linux.Seccomp = nil // which has a target of its own, and takes most of the time
	names, err := image.Open(dir).Names()
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(name, data)
	}
	aside := filepath.Join(f.TempDir(), "aside")
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		if image.KindOf(name) == nil {
			return
		}
		path := filepath.Join(dir, name)
		// Not over one that is there: that would wait for the disk.
		moved := os.Rename(path, aside)
		if moved != nil && !errors.Is(moved, os.ErrNotExist) {
			t.Fatal(moved)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		defer func() {
			err := os.Remove(path)
			if err == nil && moved == nil {
				err = os.Rename(aside, path)
			}
			if err != nil {
				t.Fatal(err)
			}
		}()
		dump := criu.Open(dir)
		if err := Images(t.Context(), spec, dump, noLinks); err != nil {
			if !errors.Is(err, images.ErrDamaged) && !errors.Is(err, image.ErrRefused) && !errors.Is(err, errdefs.ErrFailedPrecondition) {
				t.Errorf("%s: error %v", name, err)
			}
			return
		}
		if err := dump.Each("files.img", func(e *image.Entry) error {
			m := e.Message.(*fdinfo.FileEntry)
			if s := m.GetNlsk(); s != nil && (s.GetState() == 1 || s.GetProtocol() != unix.NETLINK_ROUTE && s.GetProtocol() != unix.NETLINK_KOBJECT_UEVENT && len(s.GetGroups()) > 0 && s.GetGroups()[0] != 0) {
				t.Errorf("a netlink socket gets through: %v", s)
			}
			if s := m.GetIsk(); s.GetType() == unix.SOCK_RAW || m.GetPsk() != nil {
				t.Errorf("a raw or packet socket gets through: %v", m)
			}
			if r := m.GetReg(); r.GetFlags()&(unix.O_CREAT|unix.O_TRUNC) != 0 {
				t.Errorf("a file that is made or cut gets through: %v", r)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
}
