// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// makeCgroup makes the cgroup of that name in every hierarchy, with all the
// controllers that there are: the kubelet wants its root to exist.
func makeCgroup(name string) error {
	infos, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return fmt.Errorf("list the cgroup hierarchies: %w", err)
	}
	var errs []error
	for _, info := range infos {
		if harness.CgroupVersion() == 2 && info.FSType == "cgroup2" {
			errs = append(errs, enableControllers(info.Mountpoint))
		}
		if err := os.Mkdir(filepath.Join(info.Mountpoint, name), 0o755); err != nil && !os.IsExist(err) {
			errs = append(errs, fmt.Errorf("make the kubelet's cgroup: %w", err))
		}
	}
	return errors.Join(errs...)
}

// enableControllers gives those below a cgroup of version 2 all its controllers,
// as runc does.
func enableControllers(dir string) error {
	controllers, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("read the cgroup controllers: %w", err)
	}
	for controller := range strings.FieldsSeq(string(controllers)) {
		// One by one, and not all can be (rdma, misc on some kernels); the
		// kubelet says which it needs.
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0)
	}
	return nil
}
