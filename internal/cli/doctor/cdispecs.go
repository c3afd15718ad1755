// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"maps"
	"os"
	"slices"
	"strings"

	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpuckpt/gpuckpt/cdi"
)

const cdiFix = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml  # or, without NVIDIA's container toolkit, gpuckpt cdi generate --output=/etc/cdi/nvidia.json"

// CheckCDI looks at the node's CDI specifications, in containerd's directories
// for them.
func CheckCDI(n *Node, dirs []string) []Check {
	a := area{name: "cdi"}
	if len(dirs) == 0 {
		dirs = cdiapi.DefaultSpecDirs
	}
	var rooted []string
	for _, dir := range dirs {
		rooted = append(rooted, n.path(dir))
	}
	where := strings.Join(dirs, ", ")
	cache, err := cdiapi.NewCache(cdiapi.WithAutoRefresh(false), cdiapi.WithSpecDirs(rooted...))
	if err != nil {
		return a.with(Warning, "specifications", err.Error(), "containers cannot ask for GPUs by CDI", cdiFix)
	}
	for _, path := range slices.Sorted(maps.Keys(cache.GetErrors())) {
		for _, err := range cache.GetErrors()[path] {
			a.add(Warning, path, err.Error(), "what it holds is ignored", cdiFix)
		}
	}
	var names []string
	missing := make(map[string]bool)
	for _, qualified := range cache.ListDevices() {
		name, ours := strings.CutPrefix(qualified, cdi.Kind+"=")
		if !ours {
			continue
		}
		names = append(names, name)
		for _, path := range hostPaths(cache.GetDevice(qualified)) {
			if _, err := os.Lstat(n.path(path)); err != nil {
				missing[path] = true
			}
		}
	}
	switch {
	case len(names) == 0:
		a.add(Warning, "GPUs", "no "+cdi.Kind+" in "+where, "containers cannot ask for GPUs by CDI (ctr run --gpus, nerdctl --gpus, device plugins that use it)", cdiFix)
	case len(missing) > 0:
		gone := slices.Sorted(maps.Keys(missing))
		text := gone[0]
		if len(gone) > 1 {
			text += " and others"
		}
		a.add(Failure, "GPUs", "the specification names files that are not there: "+text, "containers with these GPUs do not start; it was made for another driver version", cdiFix)
	default:
		a.ok("GPUs", "%s=%s", cdi.Kind, strings.Join(names, ", "))
	}
	return a.checks
}

// hostPaths returns the node's files that a device, or its specification, brings into a container.
func hostPaths(d *cdiapi.Device) (paths []string) {
	edits := d.GetSpec().ContainerEdits
	for _, m := range slices.Concat(edits.Mounts, d.ContainerEdits.Mounts) {
		paths = append(paths, m.HostPath)
	}
	for _, node := range slices.Concat(edits.DeviceNodes, d.ContainerEdits.DeviceNodes) {
		paths = append(paths, cmp.Or(node.HostPath, node.Path))
	}
	return paths
}
