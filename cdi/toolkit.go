// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"path"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Toolkit is how NVIDIA's container toolkit is configured on this node: which
// containers get the GPUs that a variable or mounts of theirs name. The zero value
// stands for privileged containers only.
type Toolkit struct {
	// Runtime reports that the OCI runtime is the toolkit's, nvidia-container-runtime,
	// which adds GPUs without a hook in the spec.
	Runtime bool
	// Variable reports that NVIDIA_VISIBLE_DEVICES counts in containers that are not
	// privileged (accept-nvidia-visible-devices-envvar-when-unprivileged).
	Variable bool
	// Mounts reports that mounts in /var/run/nvidia-container-devices count, before the
	// variable (accept-nvidia-visible-devices-as-volume-mounts).
	Mounts bool
}

// adds returns the GPUs that the toolkit would add to a container outside of its
// spec: by its own hook or runtime, or by hooks with arguments.
func (t Toolkit) adds(r Request) []string {
	names := r.arguments
	switch {
	case !r.hook && !t.Runtime:
	case t.Mounts && len(r.mounted) > 0:
		names = append(names, r.mounted...)
	case t.Variable || r.privileged:
		if len(r.variable) != 1 || r.variable[0] != deviceMounts { // which says "see the mounts"
			names = append(names, r.variable...)
		}
	}
	return names
}

// isToolkitHook reports whether a hook is the toolkit's own.
func isToolkitHook(h specs.Hook) bool {
	name := path.Base(h.Path)
	return name == "nvidia-container-runtime-hook" || name == "nvidia-container-toolkit"
}

// cliHook reports whether a hook calls libnvidia-container's program, as nerdctl's
// does, and returns the GPUs that it names.
func cliHook(h specs.Hook) (names []string, ours bool) {
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
