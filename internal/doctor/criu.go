// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// criuMinimum is the oldest CRIU that dumps what a CUDA process has open.
const criuMinimum = "4.2"

// criuFix is how to get a CRIU that is new enough.
const criuFix = "add-apt-repository --yes ppa:criu/ppa && apt-get install --yes criu  # Ubuntu; elsewhere see https://criu.org/Installation, and name it in [criu] path of /etc/gpuckpt/config.toml"

// CheckCRIU looks at the criu that a shim would use, and has it look at the
// kernel.
func CheckCRIU(ctx context.Context, n *Node) []Check {
	a := area{name: "criu"}
	const without = "GPU containers run, and can be suspended, but neither checkpointed nor restored"
	path := n.CRIU
	if path == "" {
		var err error
		if path, err = n.look("criu"); err != nil {
			a.add(Failure, "program", "none in containerd's $PATH", without, criuFix)
			return a.checks
		}
	} else if _, err := os.Stat(path); err != nil {
		a.add(Failure, "program", "[criu] path: "+err.Error(), without, "# install CRIU there, or change [criu] path in /etc/gpuckpt/config.toml")
		return a.checks
	}
	out, stderr, err := n.run(ctx, path, "--version")
	version := criuVersion(out)
	switch {
	case err != nil || version == "":
		a.add(Failure, "program", path+" does not run: "+firstLine(stderr, err), without, criuFix)
		return a.checks
	case older(version, criuMinimum):
		a.add(Failure, "program", path+" is version "+version, "too old for GPU containers, which need "+criuMinimum+": "+without, criuFix)
	default:
		a.ok("program", "%s, version %s", path, version)
	}
	a.criuChecks(ctx, n, path)
	a.networkLock(ctx, n, path)
	if mounts, err := n.mounts(); err == nil {
		if m := mountOf(mounts, "/run"); m == nil || m.FSType != "tmpfs" {
			a.add(Warning, "cache", "/run is not on a tmpfs", "CRIU asks the kernel what it can do at each dump and restore, which takes a tenth of a second",
				"echo 'tmpfs /run tmpfs mode=0755,nosuid,nodev 0 0' >>/etc/fstab; reboot")
		} else {
			a.ok("cache", "/run/criu.kdat, on a tmpfs")
		}
	}
	a.cudaPlugin(n)
	return a.checks
}

// criuChecks has CRIU look at the kernel: what it must have, then what only
// some containers need.
func (a *area) criuChecks(ctx context.Context, n *Node, path string) {
	if _, stderr, err := n.run(ctx, path, "check"); err != nil {
		a.add(Failure, "check", "`criu check` fails: "+firstLine(errorsOf(stderr), err), "CRIU cannot dump or restore on this kernel",
			path+" check -v4  # names what is missing")
		return
	}
	_, stderr, err := n.run(ctx, path, "check", "--all")
	if err == nil {
		a.ok("check", "all features")
		return
	}
	// Dirty tracking serves pre-dumps, which GPU state knows not.
	var missing []string
	for line := range strings.Lines(errorsOf(stderr)) {
		missing = append(missing, strings.TrimSpace(line))
	}
	a.ok("check", "all that is needed; not here, and not used by gpuckpt: %s", strings.Join(missing, "; "))
}

// networkLock says how packets are kept away during a dump.
func (a *area) networkLock(ctx context.Context, n *Node, path string) {
	if tool, err := n.look("iptables-restore"); err == nil {
		a.ok("network lock", "iptables (%s)", tool)
		return
	}
	if _, _, err := n.run(ctx, path, "check", "--feature", "network_lock_nftables"); err == nil {
		a.ok("network lock", "nftables")
		return
	}
	a.add(Warning, "network lock", "neither iptables nor a CRIU with nftables", "packets that arrive at an established TCP connection during a dump may be lost", "apt-get install --yes iptables")
}

// cudaPlugin tells of CRIU's own CUDA plugin, which the shim sets aside.
func (a *area) cudaPlugin(n *Node) {
	for _, dir := range []string{n.env("CRIU_LIBS_DIR"), "/usr/lib/criu", "/usr/local/lib/criu", "/usr/lib64/criu", "/usr/libexec/criu", "/usr/lib/x86_64-linux-gnu/criu"} {
		if dir != "" && n.exists(dir, "cuda_plugin.so") {
			a.ok("CUDA plugin", "%s, which gpuckpt sets aside", filepath.Join(dir, "cuda_plugin.so"))
			return
		}
	}
}

// criuVersion reads "Version: 4.2.1" of `criu --version`; "" if there is none.
func criuVersion(out string) string {
	for line := range strings.Lines(out) {
		if v, ok := strings.CutPrefix(line, "Version:"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// errorsOf gives what CRIU's warnings and errors say, without their origin:
// "Warn  (criu/cr-check.c:824): Dirty tracking is OFF. …".
func errorsOf(stderr string) string {
	var b strings.Builder
	for line := range strings.Lines(stderr) {
		if _, text, ok := strings.Cut(line, "): "); ok && (strings.HasPrefix(line, "Warn") || strings.HasPrefix(line, "Error")) {
			b.WriteString(text)
		}
	}
	return b.String()
}

// firstLine is what a program printed, or why it did not run.
func firstLine(text string, err error) string {
	if line, _, _ := strings.Cut(strings.TrimSpace(text), "\n"); line != "" {
		return line
	}
	if err != nil {
		return err.Error()
	}
	return "it prints nothing"
}

// older compares dotted versions by their numbers; what is not a number ends
// the comparison.
func older(version, than string) bool {
	a, b := strings.Split(version, "."), strings.Split(than, ".")
	for i := range b {
		want, err := strconv.Atoi(b[i])
		if err != nil {
			return false
		}
		if i >= len(a) {
			return want > 0
		}
		have, err := strconv.Atoi(a[i])
		if err != nil {
			return false
		}
		if have != want {
			return have < want
		}
	}
	return false
}
