// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fh"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fsnotify"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
)

// A file of a configMap has the name that it has now, through links of the image, and a file that is there
// stays as it is.
func TestRenewed(t *testing.T) {
	root, volume := t.TempDir(), t.TempDir()
	const was, now = "..2026_11_22_10_00_00.123456789", "..2026_11_26_09_30_01.42"
	err := errors.Join(
		os.MkdirAll(filepath.Join(volume, now, "sub"), 0o755), os.Mkdir(filepath.Join(volume, "..2025_01_01_00_00_00.7"), 0o755),
		os.Symlink(now, filepath.Join(volume, "..data")), os.Symlink("/run", filepath.Join(root, "link")),
		os.MkdirAll(filepath.Join(root, "elsewhere"), 0o755), os.Symlink("../../etc", filepath.Join(root, "elsewhere", "..data")),
	)
	if err != nil {
		t.Fatal(err)
	}
	spec := &specs.Spec{Linux: &specs.Linux{}, Mounts: []specs.Mount{{Destination: "/link/config", Type: "bind", Source: volume, Options: []string{"rbind", "ro"}}}}
	r := &renewals{spec: spec, rootfs: root}
	for name, want := range map[string]string{
		"/run/config/" + was + "/key":                            "/run/config/" + now + "/key",
		"/run/config/" + was + "/sub/key":                        "/run/config/" + now + "/sub/key",
		"/run/config/" + was:                                     "/run/config/" + now,
		"/run/config/" + now + "/key":                            "", // it is there
		"/run/config/..2025_01_01_00_00_00.7/key":                "",
		"/run/config/key":                                        "",
		"/run/config/..2026/key":                                 "",
		"/run/config/none/" + was + "/key":                       "",
		"/elsewhere/" + was + "/passwd":                          "", // ..data leads to no such directory
		"/elsewhere/none/" + was + "/passwd":                     "",
		"/run/config/../config/" + was + "/key":                  "",
		"/run/config/..2026_11_22_10_00_00.1/../" + was + "/key": "",
	} {
		if got, err := r.name(name); err != nil || got != want {
			t.Errorf("%s is %q, %v; want %q", name, got, err, want)
		}
	}
	name := "/run/config/" + was + "/key"
	open := &fdinfo.FileEntry{Reg: &regfile.RegFileEntry{Name: &name, Size: proto.Uint64(3), BuildId: []uint32{1}}}
	watch := &fdinfo.FileEntry{Ify: &fsnotify.InotifyFileEntry{Wd: []*fsnotify.InotifyWdEntry{{FHandle: &fh.FhEntry{Path: new(name)}}}}}
	if err := errors.Join(r.file(open), r.file(watch)); err != nil {
		t.Fatal(err)
	}
	want := "/run/config/" + now + "/key"
	if open.Reg.GetName() != want || open.Reg.Size != nil || open.Reg.BuildId != nil || watch.Ify.Wd[0].FHandle.GetPath() != want {
		t.Errorf("got %v and %v", open, watch)
	}
}
