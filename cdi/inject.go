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
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// Kind is the kind of NVIDIA's GPUs in CDI specifications.
const Kind = "nvidia.com/gpu"

// ErrNoDevice reports that the CDI specifications lack a device that a container asks for.
var ErrNoDevice = errors.New("no such CDI device")

// Registry holds the node's CDI specifications as of Open.
type Registry struct {
	cache *cdilib.Cache
	dirs  []string
}

// Open reads the CDI specifications in the directories, CDI's own by default (/etc/cdi,
// /var/run/cdi); later ones win. It ignores directories and files that it cannot read.
func Open(dirs ...string) (_ *Registry, err error) {
	if len(dirs) == 0 {
		dirs = slices.Clone(cdilib.DefaultSpecDirs)
	}
	defer func() {
		// CDI's library (1.1.1) dereferences entries that are null. A shim has more to do than to read these.
		if cause := recover(); cause != nil {
			err = fmt.Errorf("read CDI specifications in %s: one of them is damaged: %v", strings.Join(dirs, ", "), cause)
		}
	}()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dirs...), cdilib.WithAutoRefresh(false))
	if err != nil {
		return nil, fmt.Errorf("read CDI specifications in %s: %w", strings.Join(dirs, ", "), err)
	}
	return &Registry{cache: cache, dirs: dirs}, nil
}

// Devices returns the names of the GPUs, such as "nvidia.com/gpu=0".
func (r *Registry) Devices() []string {
	return slices.DeleteFunc(r.cache.ListDevices(), func(name string) bool {
		return !strings.HasPrefix(name, Kind+"=")
	})
}

// Files returns the driver files that the specifications mount into containers, each once.
func (r *Registry) Files() []File {
	var files []File
	add := func(edits cdispecs.ContainerEdits) {
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
		add(spec.ContainerEdits)
		for _, d := range spec.Devices {
			add(d.ContainerEdits)
		}
	}
	return files
}

// Inject puts into a spec, by the CDI specifications, the GPUs that hooks of NVIDIA's container
// toolkit would add outside of it, and removes the hooks. It returns false, and changes nothing, if
// the toolkit would add nothing or the spec has GPUs already.
//
// The error is ErrNoDevice if the specifications lack a GPU that the spec asks for, or name files
// that this machine does not have. The spec is then as it was.
func (r *Registry) Inject(spec *specs.Spec, toolkit Toolkit) (bool, error) {
	request := Read(spec)
	given := toolkit.adds(request)
	if len(given) == 0 || len(request.Minors) > 0 {
		return false, nil
	}
	names := slices.Clone(given)
	for i, name := range names {
		if !strings.Contains(name, "=") {
			names[i] = Kind + "=" + name
		}
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
	if h := edited.Hooks; h != nil {
		ours := func(h specs.Hook) bool {
			_, cli := cliHook(h)
			return cli || isToolkitHook(h)
		}
		//nolint:staticcheck // the toolkit's hook is one of the deprecated kind
		h.Prestart = slices.DeleteFunc(h.Prestart, ours)
		h.CreateRuntime = slices.DeleteFunc(h.CreateRuntime, ours)
	}
	*spec = *edited
	return true, nil
}
