// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

// Source is one place in a spec that asks for GPUs.
type Source struct {
	// How names the place: "linux.devices", "mounts", "annotation cdi.k8s.io/…",
	// "NVIDIA_VISIBLE_DEVICES", a hook's program.
	How string
	// Names are the GPUs there: nodes, indices, UUIDs, CDI names, "all".
	Names []string
}

// Request is what a spec asks for and what it grants.
type Request struct {
	// Sources are all places that ask for GPUs, also those that grant none by themselves.
	Sources []Source
	// Minors are N of each /dev/nvidiaN that the container gets, ascending.
	Minors []int
	// AllNodes reports that the container has the host's /dev, and so every GPU.
	AllNodes bool
	// MIG is the place that asks for an instance of a partitioned GPU, MPS the one that asks for a
	// share by NVIDIA's multi-process service; empty without.
	MIG, MPS string

	variable, mounted []string // GPUs that the toolkit reads from the spec
	hook              bool     // the spec has the toolkit's own hook
	arguments         []string // GPUs that other hooks have as arguments
	privileged        bool
}

// Grants reports whether the spec grants a GPU of this node.
func (r Request) Grants(g GPU) bool { return r.AllNodes || slices.Contains(r.Minors, g.Minor) }

// Complete reports whether the container gets Minors and no other GPU, none shared or partitioned.
func (r Request) Complete() bool {
	return len(r.Minors) > 0 && !r.AllNodes && !r.hook && len(r.arguments) == 0 && r.MIG == "" && r.MPS == ""
}

// String returns what was asked, such as "linux.devices: /dev/nvidia0".
func (r Request) String() string {
	var asks []string
	for _, a := range r.Sources {
		asks = append(asks, a.How+": "+strings.Join(a.Names, ", "))
	}
	return cmp.Or(strings.Join(asks, "; "), "no GPU")
}

const (
	// visibleDevices is the variable that NVIDIA's container toolkit reads.
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// mpsPipe is the variable by which CUDA programs find MPS.
	mpsPipe = "CUDA_MPS_PIPE_DIRECTORY"
	// deviceMounts is where a device plugin mounts /dev/null once for each GPU, under its name: the
	// toolkit's way around an image's variables (accept-nvidia-visible-devices-as-volume-mounts).
	deviceMounts = "/var/run/nvidia-container-devices"
)

// Read returns which GPUs a spec asks for and grants.
func Read(spec *specs.Spec) Request {
	var r Request
	r.readNodes(spec)
	r.readMounts(spec)
	r.readAnnotations(spec)
	r.readProcess(spec)
	r.readHooks(spec)
	r.Minors = ascending(r.Minors)
	for _, a := range r.Sources {
		for _, name := range a.Names {
			if r.MIG == "" && namesInstance(name) {
				r.MIG = a.How + " " + name
			}
		}
	}
	return r
}

// ask notes the names of one place, if there are any.
func (r *Request) ask(how string, names ...string) {
	if len(names) > 0 {
		r.Sources = append(r.Sources, Source{How: how, Names: names})
	}
}

// Replace notes that a container was given other GPUs while it lived, by their minors.
func (r *Request) Replace(revoked, granted []int) {
	kept := slices.DeleteFunc(slices.Clone(r.Minors), func(n int) bool { return slices.Contains(revoked, n) })
	r.Minors = ascending(append(kept, granted...))
}

func ascending(minors []int) []int { return slices.Compact(slices.Sorted(slices.Values(minors))) }

func (r *Request) readNodes(spec *specs.Spec) {
	if spec.Linux == nil {
		return
	}
	var gpus []string
	for _, d := range spec.Linux.Devices {
		if minor, ok := MinorOf(d.Path); ok {
			gpus = append(gpus, d.Path)
			r.Minors = append(r.Minors, minor)
		}
		if r.MIG == "" && isInstance(d.Path) {
			r.MIG = "linux.devices " + d.Path
		}
	}
	r.ask("linux.devices", gpus...)
}

// readMounts reads nodes that are mounted, singly or with all of /dev, and a device plugin's names.
func (r *Request) readMounts(spec *specs.Spec) {
	var nodes []string
	for _, m := range spec.Mounts {
		dest := path.Clean(m.Destination)
		minor, node := MinorOf(dest)
		switch rest, plugin := strings.CutPrefix(dest, deviceMounts+"/"); {
		case plugin:
			r.mounted = append(r.mounted, cdiPath(rest))
		case node && IsBind(m):
			nodes = append(nodes, dest)
			r.Minors = append(r.Minors, minor)
		case dest == "/dev" && IsBind(m):
			nodes = append(nodes, dest)
			r.AllNodes = true
		}
	}
	r.ask("mounts", nodes...)
	r.ask("mounts in "+deviceMounts, r.mounted...)
}

// cdiPath turns "cdi/nvidia.com/gpu/0" of a device plugin into "nvidia.com/gpu=0".
func cdiPath(p string) string {
	if parts := strings.SplitN(p, "/", 4); len(parts) == 4 && parts[0] == "cdi" {
		return parts[1] + "/" + parts[2] + "=" + parts[3]
	}
	return p
}

// IsBind reports whether runc takes a mount for a bind mount, by its type or options.
func IsBind(m specs.Mount) bool {
	return m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
}

// readAnnotations reads the CDI names that clients leave beside what they have injected.
func (r *Request) readAnnotations(spec *specs.Spec) {
	for _, key := range slices.Sorted(maps.Keys(spec.Annotations)) {
		if strings.HasPrefix(key, cdilib.AnnotationPrefix) {
			r.ask("annotation "+key, split(spec.Annotations[key])...)
		}
	}
}

// readProcess reads NVIDIA_VISIBLE_DEVICES, which grants nothing: many images set it to "all".
func (r *Request) readProcess(spec *specs.Spec) {
	if spec.Process == nil {
		return
	}
	c := spec.Process.Capabilities
	r.privileged = c != nil && slices.Contains(c.Bounding, "CAP_SYS_ADMIN")
	for _, kv := range spec.Process.Env { // the last one counts
		name, value, _ := strings.Cut(kv, "=")
		switch {
		case name == visibleDevices:
			r.variable = split(value)
			if len(r.variable) == 1 && (r.variable[0] == "none" || r.variable[0] == "void") {
				r.variable = nil
			}
		case name == mpsPipe && value != "":
			r.MPS = kv
		}
	}
	r.ask(visibleDevices, r.variable...)
}

// readHooks reads the toolkit's hooks, which add GPUs outside of the spec.
func (r *Request) readHooks(spec *specs.Spec) {
	if spec.Hooks == nil {
		return
	}
	//nolint:staticcheck // the toolkit's hook is one of the deprecated kind
	for _, h := range slices.Concat(spec.Hooks.Prestart, spec.Hooks.CreateRuntime) {
		if isToolkitHook(h) {
			r.hook = true
		}
		names, _ := cliHook(h)
		r.arguments = append(r.arguments, names...)
		r.ask("hook "+h.Path, names...)
	}
}

// namesInstance reports whether a name means a MIG instance: "MIG-…", or "0:1" by its GPU's index.
func namesInstance(name string) bool {
	device := name[strings.Index(name, "=")+1:]
	var gpu, instance int
	n, _ := fmt.Sscanf(device, "%d:%d", &gpu, &instance)
	return strings.HasPrefix(device, "MIG-") || n == 2
}

// split splits a list at its commas and leaves out empty names.
func split(list string) []string {
	var names []string
	for name := range strings.SplitSeq(list, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}
