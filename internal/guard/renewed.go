// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"path"
	"regexp"
	"strings"
	"sync"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// A kubelet writes the files of a configMap or secret into a directory that is named by the time, and makes
// the link ..data lead to it (AtomicWriter in Kubernetes' pkg/volume/util). So a file that a program has open
// or watches has another name in each pod, and whenever its content is renewed.
var written = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(/.*)/(\.\.\d{4}_\d\d_\d\d_\d\d_\d\d_\d\d\.\d+)(/.+)?$`)
})

// renewals finds the names that such files have now.
type renewals struct {
	spec   *specs.Spec
	rootfs string
	paths  *paths // nil before the first
}

// file gives an open file, and what is watched, the name that it has now. Such a file need not have the size
// that it had.
func (r *renewals) file(f *fdinfo.FileEntry) error {
	if reg := f.GetReg(); reg != nil {
		name, err := r.name(reg.GetName())
		if err != nil || name == "" {
			return err
		}
		reg.Name, reg.Size, reg.BuildId, reg.Checksum = &name, nil, nil, nil
	}
	for _, w := range f.GetIfy().GetWd() {
		h := w.GetFHandle()
		name, err := r.name(h.GetPath())
		if err != nil {
			return err
		}
		if name != "" {
			h.Path = &name
		}
	}
	return nil
}

// name returns another name for a path of the container that is not there; "" for none.
func (r *renewals) name(was string) (string, error) {
	if !strings.Contains(was, "/..2") {
		return "", nil
	}
	part := written().FindStringSubmatch(was)
	if part == nil || path.Clean(was) != was {
		return "", nil
	}
	if r.paths == nil {
		spec, _ := bundle.AtPlaces(r.spec, r.rootfs)
		r.paths = newPaths(spec, r.rootfs)
	}
	root, rest := r.paths.within(part[1])
	if root == "" {
		return "", nil
	}
	top, err := openDir(unix.AT_FDCWD, root, 0)
	if err != nil {
		return "", err
	}
	defer closeDir(top)
	dir := top
	for name := range strings.FieldsFuncSeq(rest, func(r rune) bool { return r == '/' }) {
		if dir, err = openDir(dir, name, unix.O_NOFOLLOW); err != nil {
			return "", nil
		}
		defer closeDir(dir)
	}
	if dir < 0 {
		return "", nil
	}
	var st unix.Stat_t
	if err := unix.Fstatat(dir, part[2], &st, unix.AT_SYMLINK_NOFOLLOW); !errors.Is(err, unix.ENOENT) {
		return "", err
	}
	now := make([]byte, unix.NAME_MAX)
	n, err := unix.Readlinkat(dir, "..data", now)
	if err != nil {
		return "", nil // CRIU says what is missing
	}
	name := path.Join(part[1], string(now[:n]))
	if again := written().FindStringSubmatch(name); again == nil || again[1] != part[1] || again[3] != "" {
		return "", nil
	}
	return name + part[3], nil
}
