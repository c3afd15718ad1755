// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"

	"golang.org/x/sys/unix"
)

// DiskDir is T.TempDir on a disk: a machine's directory for temporary files may be
// memory, and the tests may have been given one that is (GPUCKPT_TEST_DIR).
func DiskDir(t T) string {
	t.Helper()
	for _, parent := range []string{os.TempDir(), "/var/tmp"} {
		var st unix.Statfs_t
		if err := unix.Statfs(parent, &st); err != nil || st.Type == unix.TMPFS_MAGIC {
			continue
		}
		dir, err := os.MkdirTemp(parent, "gpuckpt-disk-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	t.Fatal("neither the directory for temporary files nor /var/tmp is on a disk")
	return ""
}
