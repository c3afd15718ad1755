// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go/features"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

// ShimName is the file name of this project's shim.
const ShimName = proc.ShimName

const installFix = "make install  # in gpuckpt's sources; of a release, install the package or the archive again"

// runcCheckpoint is runc's annotation of whether it was built with checkpoints (features.go).
const runcCheckpoint = "org.opencontainers.runc.checkpoint.enabled"

// CheckPrograms looks at this project's programs and at its configuration, which lies at path;
// configured is the error of reading that.
func CheckPrograms(ctx context.Context, n *Node, path string, configured error) []Check {
	a := area{name: "gpuckpt"}
	found := path
	if _, err := os.Stat(path); err != nil {
		found = "the defaults (there is no " + path + ")"
	}
	if configured != nil {
		a.add(Failure, "configuration", configured.Error(), "checkpoints and restores fail until it is corrected", "# edit "+path)
	} else {
		a.ok("configuration", "%s", found)
	}
	shim, err := n.Look(ShimName)
	build := n.buildOf(ctx, shim)
	a.either(err == nil, "shim", shim+build,
		Failure, "no "+ShimName+" in containerd's $PATH", "containers cannot use the runtime by its name, nor be checkpointed", installFix)
	const without = "GPU containers can be neither checkpointed nor restored nor suspended"
	helper, err := n.helper()
	if err != nil {
		return a.with(Failure, "helper", "no "+cuda.HelperName+" beside the shim, nor in containerd's $PATH", without, installFix)
	}
	itsVersion := n.buildOf(ctx, helper)
	a.either(shim == "" || build == itsVersion, "helper", helper+itsVersion,
		Failure, helper+itsVersion+", and the shim"+build, "programs of different builds do not understand each other", installFix)
	if shim != "" {
		plugin, err := criu.FindPlugin(shim)
		a.either(err == nil, "CRIU plugin", plugin,
			Failure, "no "+criu.PluginName+" beside the shim, nor in ../lib/gpuckpt", "GPU containers can be suspended, but neither checkpointed nor restored", installFix)
		tar, missing := version.Beside(shim, tmpfs.ProgramName)
		its := n.buildOf(ctx, tar)
		switch {
		case missing != nil:
			a.add(Warning, "tmpfs helper", "no "+tmpfs.ProgramName+" beside the shim, nor in ../lib/gpuckpt", "a checkpoint and a restore take some 4 ms longer for each tmpfs of a container", installFix)
		case its != build:
			a.add(Failure, "tmpfs helper", tar+its+", and the shim"+build, "programs of different builds do not understand each other", installFix)
		default:
			a.ok("tmpfs helper", "%s%s", tar, its)
		}
	}
	return a.checks
}

// buildOf returns ", version …", what a program says of its build, "" where it says nothing.
func (n *Node) buildOf(ctx context.Context, program string) string {
	if program == "" {
		return ""
	}
	out, _, err := n.Run(ctx, program, "--version")
	_, text, ok := strings.Cut(strings.TrimSpace(out), " ")
	if err != nil || !ok {
		return ""
	}
	return ", version " + text
}

// CheckRunc looks at the runc that shims run.
func CheckRunc(ctx context.Context, n *Node) []Check {
	a := area{name: "runc"}
	const fix = "apt-get install --yes runc  # or see https://github.com/opencontainers/runc/releases"
	path, err := n.Look("runc")
	if err != nil {
		return a.with(Failure, "program", "none in containerd's $PATH", "no container can run", fix)
	}
	out, stderr, err := n.Run(ctx, path, "--version")
	if err != nil {
		return a.with(Failure, "program", path+" does not run: "+firstLine(stderr, err), "no container can run", fix)
	}
	number := strings.TrimPrefix(firstLine(out, nil), "runc version ")
	out, stderr, err = n.Run(ctx, path, "features")
	var f features.Features
	if err == nil {
		err = json.Unmarshal([]byte(out), &f)
	}
	switch {
	case err != nil:
		a.add(Warning, "program", path+", version "+number+", does not print its features: "+firstLine(stderr, err), "it may have been built without checkpoints", fix)
	case f.Annotations[runcCheckpoint] == "false":
		a.add(Failure, "program", path+", version "+number+", built without checkpoints", "nothing can be checkpointed or restored", fix)
	default:
		a.ok("program", "%s, version %s", path, number)
	}
	return a.checks
}

func isShim(path string) bool { return filepath.Base(path) == ShimName }
