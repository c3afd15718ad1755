// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"path/filepath"
	"strings"
)

// The handlers that pods can be run with, one for each way to name this shim.
const (
	// ByPath is runc's runtime with this shim in its place: clients that look at
	// the runtime's name give it runc's options.
	ByPath = "gpuckpt"
	// ByName is this shim by its own name: CRI gives it its options as TOML, and
	// no options of a checkpoint.
	ByName = "gpuckpt-by-name"
)

// pauseImage holds pods' namespaces.
const pauseImage = "gpuckpt.test/pause:latest"

func cdiDir(dir string) string { return filepath.Join(dir, "cdi") }
func cniDir(dir string) string { return filepath.Join(dir, "cni") }
func tlsDir(dir string) string { return filepath.Join(dir, "registries") }

// runtimes are those of a node.
const runtimes = `
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.%s]
runtime_type = "io.containerd.runc.v2"
runtime_path = %q
pod_annotations = ["dev.gpuckpt.*"]
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.%s]
runtime_type = "io.containerd.gpuckpt.v2"
pod_annotations = ["dev.gpuckpt.*"]
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.%s.options]
SystemdCgroup = false
`

// criConfig gives the part of containerd's configuration that is CRI's, for an
// instance in a directory. The error names a program that is missing.
func (n *Node) criConfig() (func(dir string) string, error) {
	shim, err := n.opts.Bins.Path("containerd-shim-gpuckpt-v2")
	if err != nil {
		return nil, err
	}
	plugin, err := n.opts.Bins.Path("bridge")
	if err != nil {
		return nil, err
	}
	return func(dir string) string {
		var b strings.Builder
		registries, specs := tlsDir(dir), fmt.Sprintf("cdi_spec_dirs = [%q]\n", cdiDir(dir))
		if n.opts.Machine {
			registries, specs = "", "" // the defaults
		}
		fmt.Fprintf(&b, `
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = %q
[plugins.'io.containerd.cri.v1.images'.registry]
config_path = %q
[plugins.'io.containerd.cri.v1.runtime']
%snetns_mounts_under_state_dir = true
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = [%q]
conf_dir = %q
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = %q
`, pauseImage, registries, specs, filepath.Dir(plugin), cniDir(dir), n.opts.Runtime)
		if n.opts.Runtimes != "" {
			b.WriteString(n.opts.Runtimes)
		} else {
			fmt.Fprintf(&b, runtimes, ByPath, shim, ByName, ByName)
		}
		return b.String()
	}, nil
}
