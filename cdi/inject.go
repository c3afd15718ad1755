// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

// Kind is the kind of NVIDIA's GPUs in CDI specifications.
const Kind = "nvidia.com/gpu"

// ErrNoDevice says that the node's CDI specifications do not have, or do not
// have any more, what a container asks for.
var ErrNoDevice = errors.New("no such CDI device")

// Registry is the node's CDI specifications, as they were when it was opened.
type Registry struct {
	cache *cdilib.Cache
	dirs  []string
}

// Open reads the CDI specifications in the directories, of which the last ones
// win; without any, in CDI's own, /etc/cdi and /var/run/cdi. A directory that
// is not there is empty, and a file that cannot be read is left out.
func Open(dirs ...string) (*Registry, error) {
	if len(dirs) == 0 {
		dirs = slices.Clone(cdilib.DefaultSpecDirs)
	}
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dirs...), cdilib.WithAutoRefresh(false))
	if err != nil {
		return nil, fmt.Errorf("read CDI specifications in %s: %w", strings.Join(dirs, ", "), err)
	}
	return &Registry{cache: cache, dirs: dirs}, nil
}

// Devices are the names of the GPUs, "nvidia.com/gpu=0".
func (r *Registry) Devices() []string {
	return slices.DeleteFunc(r.cache.ListDevices(), func(name string) bool {
		return !strings.HasPrefix(name, Kind+"=")
	})
}

// Files are the driver's files that the specifications mount into containers,
// each once.
func (r *Registry) Files() []File {
	var files []File
	add := func(edits *cdilib.ContainerEdits) {
		for _, m := range edits.Mounts {
			f := File{Host: m.HostPath, Container: path.Clean(m.ContainerPath)}
			if !slices.Contains(files, f) {
				files = append(files, f)
			}
		}
	}
	vendor, _, _ := strings.Cut(Kind, "/")
	for _, spec := range r.cache.GetVendorSpecs(vendor) {
		if spec.Kind != Kind {
			continue
		}
		add(&cdilib.ContainerEdits{ContainerEdits: &spec.ContainerEdits})
		for i := range spec.Devices {
			add(&cdilib.ContainerEdits{ContainerEdits: &spec.Devices[i].ContainerEdits})
		}
	}
	return files
}

// Inject does inside a spec what NVIDIA's container toolkit would do outside it,
// by hooks: it adds the nodes, cgroup rules and mounts of the GPUs that it would
// give, by the CDI specifications, and takes the hooks away. It answers false, and
// changes nothing, for a spec to which the toolkit would give nothing, or which
// has GPUs already.
//
// The error is ErrNoDevice when the specifications lack a GPU that was asked
// for, or name files and nodes that this machine does not have; the spec is
// then as it was.
func (r *Registry) Inject(spec *specs.Spec, toolkit Toolkit) (bool, error) {
	request := Read(spec)
	given := toolkit.gives(request)
	if len(given) == 0 || len(request.Minors) > 0 {
		return false, nil
	}
	var names []string
	for _, name := range given {
		if !strings.Contains(name, "=") {
			name = Kind + "=" + name
		}
		names = append(names, name)
	}
	edited, err := clone(spec)
	if err != nil {
		return false, err
	}
	if missing, err := r.cache.InjectDevices(edited, names...); err != nil {
		if len(missing) > 0 {
			return false, fmt.Errorf("%w: %s, in %s; there are: %s. `gpuckpt cdi generate`, or nvidia-ctk, writes a specification",
				ErrNoDevice, strings.Join(missing, ", "), strings.Join(r.dirs, ", "), strings.Join(r.Devices(), ", "))
		}
		return false, fmt.Errorf("%w: %w", ErrNoDevice, err)
	}
	for _, m := range edited.Mounts {
		if slices.ContainsFunc(spec.Mounts, func(old specs.Mount) bool { return old.Destination == m.Destination }) {
			continue
		}
		if _, err := os.Stat(m.Source); IsBind(m) && err != nil {
			return false, fmt.Errorf("%w: the specification in %s is of another driver or machine: %w; write it anew", ErrNoDevice, strings.Join(r.dirs, ", "), err)
		}
	}
	removeHooks(edited)
	*spec = *edited
	return true, nil
}

// removeHooks takes the toolkit's hooks out of a spec.
func removeHooks(spec *specs.Spec) {
	if spec.Hooks == nil {
		return
	}
	ours := func(h specs.Hook) bool {
		_, cli := cliHook(h)
		return cli || isToolkitHook(h)
	}
	//nolint:staticcheck // the toolkit's hook is one of the deprecated kind
	spec.Hooks.Prestart = slices.DeleteFunc(spec.Hooks.Prestart, ours)
	spec.Hooks.CreateRuntime = slices.DeleteFunc(spec.Hooks.CreateRuntime, ours)
}
