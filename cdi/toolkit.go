// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/pelletier/go-toml/v2"
)

// Toolkit is how this node's NVIDIA container toolkit is configured: which containers get the GPUs
// that a variable or mounts of theirs name. The zero value stands for privileged ones only.
type Toolkit struct {
	// Runtime reports that the OCI runtime is nvidia-container-runtime, which needs no hook.
	Runtime bool `toml:"-"`
	// Variable reports that NVIDIA_VISIBLE_DEVICES counts in unprivileged containers.
	Variable bool `toml:"accept-nvidia-visible-devices-envvar-when-unprivileged"`
	// Mounts reports that mounts in /var/run/nvidia-container-devices count, before the variable.
	Mounts bool `toml:"accept-nvidia-visible-devices-as-volume-mounts"`
}

const toolkitConfig = "/etc/nvidia-container-runtime/config.toml"

// readToolkit reads the toolkit's file over the toolkit's own defaults.
func readToolkit(path string) (Toolkit, error) {
	t := Toolkit{Variable: true}
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return Toolkit{}, fmt.Errorf("read the NVIDIA container toolkit's configuration: %w", err)
	}
	if err := toml.Unmarshal(data, &t); err != nil {
		return Toolkit{}, fmt.Errorf("read the NVIDIA container toolkit's configuration %s: %w", path, err)
	}
	return t, nil
}

// InjectHooked calls Inject for the toolkit as this machine has it. runtime reports that the OCI
// runtime is the toolkit's; specDirs are the directories of CDI specifications.
func InjectHooked(spec *specs.Spec, runtime bool, specDirs []string) (bool, error) {
	registry, err := Open(specDirs...)
	if err != nil {
		return false, err
	}
	toolkit, err := readToolkit(toolkitConfig)
	if err != nil {
		return false, err
	}
	toolkit.Runtime = runtime
	return registry.Inject(spec, toolkit)
}

// adds returns the GPUs that the toolkit would add outside of the spec, by hooks or its runtime.
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

func isToolkitHook(h specs.Hook) bool {
	name := path.Base(h.Path)
	return name == "nvidia-container-runtime-hook" || name == "nvidia-container-toolkit"
}

// cliHook reports whether a hook calls libnvidia-container's program, and returns its GPUs.
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
