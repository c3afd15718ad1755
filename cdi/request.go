// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

// Ask is one way in which a spec asks for GPUs.
type Ask struct {
	// How names the place in the spec: "linux.devices", "mounts",
	// "annotation cdi.k8s.io/…", "NVIDIA_VISIBLE_DEVICES", a hook's program.
	How string
	// Names are what stands there: nodes, indices, UUIDs, CDI names, "all".
	Names []string
}

// Request is what a spec asks for, and what it grants.
type Request struct {
	// Asks are all the ways in which it asks, also those that grant nothing by
	// themselves.
	Asks []Ask
	// Minors are N of the /dev/nvidiaN that the container gets, ascending.
	Minors []int
	// AllNodes says that it has the host's /dev, and so every GPU.
	AllNodes bool
	// MIG and MPS say by what the spec asks for an instance of a partitioned
	// GPU, and for a share in one by NVIDIA's multi-process service; empty
	// where it does not.
	MIG, MPS string

	hooks []string // names for CDI that the toolkit's hooks would inject
	hook  string   // the program of such a hook; empty for none
}

// Grants says whether a GPU of this node is among those that the spec grants.
func (r Request) Grants(g GPU) bool { return r.AllNodes || slices.Contains(r.Minors, g.Minor) }

// String tells what was asked, "linux.devices: /dev/nvidia0".
func (r Request) String() string {
	var asks []string
	for _, a := range r.Asks {
		asks = append(asks, a.How+": "+strings.Join(a.Names, ", "))
	}
	if len(asks) == 0 {
		return "no GPU"
	}
	return strings.Join(asks, "; ")
}

const (
	// visibleDevices is the variable that NVIDIA's container toolkit goes by.
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// mpsPipe is the variable by which CUDA programs find MPS.
	mpsPipe = "CUDA_MPS_PIPE_DIRECTORY"
	// deviceMounts is where a device plugin mounts /dev/null, once for each
	// GPU, under its name: the toolkit's way around variables that an image
	// sets (accept-nvidia-visible-devices-as-volume-mounts).
	deviceMounts = "/var/run/nvidia-container-devices"
)

// Read finds out which GPUs a spec asks for and grants.
func Read(spec *specs.Spec) Request {
	var r Request
	r.readNodes(spec)
	mounted := r.readMounts(spec)
	r.readAnnotations(spec)
	variable := r.readEnv(spec)
	r.readHooks(spec, variable, mounted)
	slices.Sort(r.Minors)
	r.Minors = slices.Compact(r.Minors)
	for _, a := range r.Asks {
		for _, name := range a.Names {
			if r.MIG == "" && namesInstance(name) {
				r.MIG = a.How + " " + name
			}
		}
	}
	return r
}

// ask notes what stands in one place, if anything.
func (r *Request) ask(how string, names ...string) {
	if len(names) > 0 {
		r.Asks = append(r.Asks, Ask{How: how, Names: names})
	}
}

// readNodes takes the nodes that runc makes.
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

// readMounts takes nodes that are mounted, singly or with all of /dev, and
// gives the names that a device plugin left.
func (r *Request) readMounts(spec *specs.Spec) (named []string) {
	var nodes []string
	for _, m := range spec.Mounts {
		dest := path.Clean(m.Destination)
		minor, node := MinorOf(dest)
		switch rest, plugin := strings.CutPrefix(dest, deviceMounts+"/"); {
		case plugin:
			named = append(named, strings.TrimPrefix(cdiPath(rest), "cdi/"))
		case node && isBind(m):
			nodes = append(nodes, dest)
			r.Minors = append(r.Minors, minor)
		case dest == "/dev" && isBind(m):
			nodes = append(nodes, dest)
			r.AllNodes = true
		}
	}
	r.ask("mounts", nodes...)
	r.ask("mounts in "+deviceMounts, named...)
	return named
}

// cdiPath makes "cdi/nvidia.com/gpu/0" of a device plugin "nvidia.com/gpu=0".
func cdiPath(p string) string {
	if parts := strings.SplitN(p, "/", 4); len(parts) == 4 && parts[0] == "cdi" {
		return parts[1] + "/" + parts[2] + "=" + parts[3]
	}
	return p
}

func isBind(m specs.Mount) bool {
	return m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
}

// readAnnotations takes the CDI names that clients leave beside what they have
// injected.
func (r *Request) readAnnotations(spec *specs.Spec) {
	for _, key := range sortedKeys(spec.Annotations) {
		if strings.HasPrefix(key, cdilib.AnnotationPrefix) {
			r.ask("annotation "+key, split(spec.Annotations[key])...)
		}
	}
}

// readEnv gives the names in NVIDIA_VISIBLE_DEVICES. Many images set it to
// "all": by itself it grants nothing.
func (r *Request) readEnv(spec *specs.Spec) []string {
	if spec.Process == nil {
		return nil
	}
	var names []string
	for _, kv := range spec.Process.Env { // the last one counts
		name, value, _ := strings.Cut(kv, "=")
		switch {
		case name == visibleDevices:
			names = split(value)
			if len(names) == 1 && (names[0] == "none" || names[0] == "void") {
				names = nil
			}
		case name == mpsPipe && value != "":
			r.MPS = kv
		}
	}
	r.ask(visibleDevices, names...)
	return names
}

// readHooks finds the hooks of NVIDIA's container toolkit, which give GPUs to
// the container outside the spec.
func (r *Request) readHooks(spec *specs.Spec, variable, mounted []string) {
	if spec.Hooks == nil {
		return
	}
	//nolint:staticcheck // the toolkit's hook is one of the deprecated kind
	for _, h := range slices.Concat(spec.Hooks.Prestart, spec.Hooks.CreateRuntime) {
		names, ours := hookNames(h, variable, mounted)
		if !ours {
			continue
		}
		r.hook = h.Path
		r.hooks = append(r.hooks, names...)
		r.ask("hook "+h.Path, names...)
	}
}

// hookNames says whether a hook is one of the toolkit's, and which GPUs it
// would give: its own hook goes by what a device plugin mounted, else by the
// variable; nerdctl's, which calls libnvidia-container, by its arguments.
func hookNames(h specs.Hook, variable, mounted []string) (names []string, ours bool) {
	switch path.Base(h.Path) {
	case "nvidia-container-runtime-hook", "nvidia-container-toolkit":
		if len(mounted) > 0 {
			return mounted, true
		}
		return variable, true
	}
	for _, arg := range h.Args {
		if path.Base(arg) == "nvidia-container-cli" {
			ours = true
		}
		if list, ok := strings.CutPrefix(arg, "--device="); ok && ours {
			names = append(names, split(list)...)
		}
	}
	return names, ours
}

// namesInstance says whether a name is that of a MIG instance: "MIG-…", or
// "0:1", the instance by its GPU's index.
func namesInstance(name string) bool {
	_, device, ok := strings.Cut(name, "=")
	if !ok {
		device = name
	}
	var gpu, instance int
	n, _ := fmt.Sscanf(device, "%d:%d", &gpu, &instance)
	return strings.HasPrefix(device, "MIG-") || n == 2
}

// split takes a list apart at its commas and leaves out what is empty.
func split(list string) []string {
	var names []string
	for _, name := range strings.Split(list, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
