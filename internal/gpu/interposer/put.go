// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	release "github.com/gpuckpt/gpuckpt/internal/node/version"
)

// LibraryName is the interposer's file name, and InContainer where a container has it: in the root, where
// no read-only mount is in the way of making a file to mount it on.
const (
	LibraryName = "libgpuckpt.so"
	InContainer = "/" + LibraryName
)

const preload = "LD_PRELOAD="

// Put has the programs of a container load the interposer, if the container's annotations ask for it: a
// bind mount in the spec, and LD_PRELOAD, after what is there already. A container without the
// annotation is left as it is. It is an error if this installation has no interposer.
func Put(spec *specs.Spec, view config.View) error {
	wanted, err := view.HasInterposer()
	if err != nil || !wanted || spec.Process == nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	library, err := release.Beside(self, LibraryName)
	if err != nil {
		return fmt.Errorf("find the interposer: %w, or start the container without the annotation", err)
	}
	if !slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool { return path.Clean(m.Destination) == InContainer }) {
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: InContainer, Source: library, Type: "bind", Options: []string{"bind", "ro", "nosuid", "nodev"}})
	}
	// The last one counts, as for a program's own getenv.
	for i, v := range slices.Backward(spec.Process.Env) {
		before, ok := strings.CutPrefix(v, preload)
		switch {
		case !ok:
			continue
		case strings.Contains(v, InContainer): // containerd hands on a spec that has been here
		case strings.Trim(before, ": ") == "":
			spec.Process.Env[i] = preload + InContainer
		default:
			spec.Process.Env[i] = v + ":" + InContainer
		}
		return nil
	}
	spec.Process.Env = append(spec.Process.Env, preload+InContainer)
	return nil
}
