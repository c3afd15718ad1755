// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/criu"
)

const criuFix = "add-apt-repository --yes ppa:criu/ppa && apt-get install --yes criu  # Ubuntu; elsewhere hack/setup criu in a clone of gpuckpt, or a release, which has CRIU inside"

// CheckCRIU looks at the criu that a shim would use, and has criu look at the kernel.
func CheckCRIU(ctx context.Context, n *Node) []Check {
	a := area{name: "criu"}
	const without = "GPU containers run, and can be suspended, but neither checkpointed nor restored"
	path, err := criu.Find(n, n.CRIU)
	switch {
	case err != nil && n.CRIU != "":
		return a.with(Failure, "program", err.Error(), without, "# install CRIU there, or change [criu] path in /etc/gpuckpt/config.toml")
	case err != nil:
		return a.with(Failure, "program", "none in containerd's $PATH", without, criuFix)
	}
	version, err := criu.Version(ctx, n, path)
	if err != nil {
		return a.with(Failure, "program", err.Error(), without, criuFix)
	}
	a.either(!criu.TooOld(version), "program", path+", version "+version,
		Failure, path+" is version "+version, "too old for GPU containers, which need "+criu.Minimum+": "+without, criuFix)
	a.criuChecks(ctx, n, path)
	a.networkLock(ctx, n, path)
	if mounts, err := n.mounts(); err == nil {
		a.either(typeOf(mounts, "/run") == "tmpfs", "cache", "/run/criu.kdat, on a tmpfs",
			Warning, "/run is not on a tmpfs", "CRIU asks the kernel what it can do at each dump and restore, which takes a tenth of a second",
			"echo 'tmpfs /run tmpfs mode=0755,nosuid,nodev 0 0' >>/etc/fstab; reboot")
	}
	if plugin := criu.CUDAPlugin(func(path string) bool { return n.exists(path) }, n.env("CRIU_LIBS_DIR")); plugin != "" {
		a.ok("CUDA plugin", "%s, which gpuckpt sets aside", plugin)
	}
	return a.checks
}

// criuChecks has CRIU look at the kernel: what it must have, then what only some containers need.
func (a *area) criuChecks(ctx context.Context, n *Node, path string) {
	if _, stderr, err := n.Run(ctx, path, "check"); err != nil {
		a.add(Failure, "check", "`criu check` fails: "+firstLine(errorsOf(stderr), err), "CRIU cannot dump or restore on this kernel",
			path+" check -v4  # names what is missing")
		return
	}
	_, stderr, err := n.Run(ctx, path, "check", "--all")
	if err == nil {
		a.ok("check", "all features")
		return
	}
	// Dirty tracking is for pre-dumps, which do not exist for GPU state.
	missing := cmp.Or(strings.ReplaceAll(strings.TrimSpace(errorsOf(stderr)), "\n", "; "), "it does not say what ("+err.Error()+")")
	a.ok("check", "the kernel has all that gpuckpt needs; it lacks, and gpuckpt does not use: %s", missing)
}

func (a *area) networkLock(ctx context.Context, n *Node, path string) {
	switch method, iptables := criu.NetworkLock(ctx, n, path); method {
	case criu.LockIptables:
		a.ok("network lock", "iptables (%s)", iptables)
	case criu.LockNftables:
		a.ok("network lock", "nftables")
	default:
		a.add(Warning, "network lock", "neither iptables nor a CRIU with nftables", "packets that arrive at an established TCP connection during a dump may be lost, and checkpoints may be refused because of one within the container", "apt-get install --yes iptables")
	}
}

// errorsOf returns CRIU's warnings and errors without "Warn  (criu/cr-check.c:824): ".
func errorsOf(stderr string) string {
	var b strings.Builder
	for line := range strings.Lines(stderr) {
		if _, text, ok := strings.Cut(line, "): "); ok && (strings.HasPrefix(line, "Warn") || strings.HasPrefix(line, "Error")) {
			b.WriteString(text)
		}
	}
	return b.String()
}

// firstLine returns what a program printed, or why it did not run.
func firstLine(text string, err error) string {
	if line, _, _ := strings.Cut(strings.TrimSpace(text), "\n"); line != "" {
		return line
	}
	if err != nil {
		return err.Error()
	}
	return "it prints nothing"
}
