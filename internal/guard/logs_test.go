// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// A log is made with the rights of its program's user, where the program sees it, and nowhere else.
func TestMakeLog(t *testing.T) {
	rootfs, volume, outside := t.TempDir(), t.TempDir(), t.TempDir()
	for _, dir := range []string{filepath.Join(rootfs, "roots"), filepath.Join(volume, "users")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for dir, up := filepath.Join(volume, "users"), 0; up < 3; dir, up = filepath.Dir(dir), up+1 {
		if err := os.Chmod(dir, 0o755); err != nil { // TempDir's are root's alone
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Chown(filepath.Join(volume, "users"), 1000, 1001), os.Symlink(outside, filepath.Join(volume, "link")),
		os.WriteFile(filepath.Join(volume, "file"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	spec := &specs.Spec{Mounts: []specs.Mount{
		{Destination: "/volume", Type: "bind", Source: volume}, {Destination: "/dev/shm", Type: "tmpfs", Source: "shm"},
		{Destination: "/file", Type: "bind", Source: filepath.Join(volume, "file")},
		{Destination: "/read-only", Type: "bind", Source: volume, Options: []string{"rbind", "ro"}},
	}}
	var all []madeLog
	for name, test := range map[string]struct {
		uid    uint32
		at     string // where it is made; "" for nowhere
		failed bool
	}{
		"/roots/log":               {0, filepath.Join(rootfs, "roots/log"), false},
		"/new/dir/log":             {0, filepath.Join(rootfs, "new/dir/log"), false},
		"/volume/users/log":        {1000, filepath.Join(volume, "users/log"), false},
		"/volume/users/today/log":  {1000, filepath.Join(volume, "users/today/log"), false},
		"/volume/of-root":          {1000, "", true},
		"/volume/file":             {0, "", false}, // it is there
		"/file":                    {0, "", false},
		"/dev/shm/log":             {0, "", false},
		"/read-only/log":           {0, "", false},
		"/read-only/new/log":       {0, "", false},
		"/volume/link/log":         {0, "", true},
		"/volume/users/today2/log": {0, filepath.Join(volume, "users/today2/log"), false},
	} {
		made, err := newPaths(spec, rootfs).makeLog(name, 0o640, test.uid, test.uid+1)
		if (err != nil) != test.failed {
			t.Errorf("%s: error %v", name, err)
		}
		if (made != nil) != (test.at != "") {
			t.Errorf("%s: made is %v", name, made)
		}
		if test.at == "" || made == nil {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(test.at, &st); err != nil || st.Uid != test.uid || st.Gid != test.uid+1 || st.Mode&0o7777 != 0o640 {
			t.Errorf("%s has owner %d:%d and mode %#o, %v", name, st.Uid, st.Gid, st.Mode, err)
		}
		all = append(all, *made)
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
		t.Errorf("outside there is %v, %v", left, err)
	}
	if uid, _ := unix.SetfsuidRetUid(-1); uid != 0 {
		t.Errorf("the thread goes on as user %d", uid)
	}
	// A restore that fails takes them away again, but for one that somebody has written to.
	written := filepath.Join(volume, "users/log")
	if err := os.WriteFile(written, []byte("a line"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (&Copied{logs: all}).RemoveLogs(); err != nil {
		t.Error(err)
	}
	for path, want := range map[string]string{filepath.Join(rootfs): "roots", filepath.Join(rootfs, "roots"): "", filepath.Dir(written): "log"} {
		left, err := os.ReadDir(path)
		if err != nil || len(left) > 1 || want == "" && len(left) > 0 || want != "" && (len(left) == 0 || left[0].Name() != want) {
			t.Errorf("%s has %v, %v; want %q", path, left, err, want)
		}
	}
}
