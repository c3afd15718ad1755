// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/config"
)

// criuMinimum is the oldest CRIU that dumps what a CUDA process has open.
const criuMinimum = "4.2"

// criuSettingsName is the file in the bundle that runc hands to CRIU.
const criuSettingsName = "gpuckpt-criu.conf"

// criuRuncConf is the file that runc hands to CRIU when nobody says otherwise.
const criuRuncConf = "/etc/criu/runc.conf"

// criuPluginDirs are where distributions and CRIU's own build put plugins.
var criuPluginDirs = []string{"/usr/lib/criu", "/usr/local/lib/criu", "/usr/lib64/criu", "/usr/libexec/criu", "/usr/lib/x86_64-linux-gnu/criu"}

// writeCRIUSettings writes the file that the container's org.criu.config
// names: what the container would have had without this shim, then the node's
// options, then the container's annotations. CRIU lets later lines win, and
// all of them win over what runc asks for.
func (c *container) writeCRIUSettings(ctx context.Context, view config.View) error {
	useCRIU(view.Node)
	options, err := view.CRIUOptions()
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if c.criuBase != "" {
		base, err := os.ReadFile(c.criuBase)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // runc ignores a missing file as well
			return fmt.Errorf("read CRIU settings: %w", err)
		}
		b.Write(base)
		if len(base) > 0 && base[len(base)-1] != '\n' {
			b.WriteByte('\n')
		}
	}
	base := b.String()
	if name := c.tcpDefault(options, base); name != "" {
		options[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(options)) {
		lines, err := config.CRIULines(name, options[name])
		if err != nil {
			return fmt.Errorf("CRIU option: %w: %w", err, errdefs.ErrInvalidArgument)
		}
		b.WriteString(lines)
	}
	if _, set := options["network-lock"]; !set && !hasOption(base, "network-lock") {
		if lock := networkLock(ctx); lock != lockIptables {
			b.WriteString("network-lock " + lock + "\n")
		}
	}
	if _, set := options["libdir"]; !set && !hasOption(base, "libdir") {
		dir, err := pluginsWithoutCUDA(view.CRIU.PluginDir, filepath.Join(c.bundle, "criu-plugins"))
		if err != nil {
			return err
		}
		if dir != "" {
			b.WriteString("libdir " + dir + "\n")
		}
	}
	if err := os.WriteFile(filepath.Join(c.bundle, criuSettingsName), b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("write CRIU settings: %w", err)
	}
	return nil
}

// hasOption says whether a CRIU configuration text sets an option.
func hasOption(text, name string) bool {
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == name {
			return true
		}
	}
	return false
}

// networkLockCache keeps the answer for other shims: asking CRIU takes a tenth
// of a second, as long as a small dump.
const networkLockCache = "/run/gpuckpt/network-lock"

// networkLock is chooseNetworkLock, asked once for each CRIU and boot.
func networkLock(ctx context.Context) string {
	key := networkLockKey()
	if cached, err := os.ReadFile(networkLockCache); err == nil && key != "" {
		if method, ok := strings.CutPrefix(string(cached), key+" "); ok && (method == lockIptables || method == lockNftables || method == lockSkip) {
			return method
		}
	}
	method := chooseNetworkLock(ctx)
	if key == "" {
		return method
	}
	// A cache that cannot be written is one that is not there.
	err := os.MkdirAll(filepath.Dir(networkLockCache), 0o700)
	if err == nil {
		next := fmt.Sprintf("%s.%d", networkLockCache, os.Getpid())
		if err = os.WriteFile(next, []byte(key+" "+method), 0o600); err == nil {
			err = os.Rename(next, networkLockCache)
		}
	}
	if err != nil {
		log.G(ctx).WithError(err).Debug("keep what CRIU can do")
	}
	return method
}

// networkLockKey names what an answer depends on: CRIU, the boot, and iptables.
func networkLockKey() string {
	path, err := exec.LookPath("criu")
	if err != nil {
		return ""
	}
	st, err := os.Stat(path)
	if err != nil {
		return ""
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	iptables, _ := exec.LookPath("iptables-restore")
	return fmt.Sprintf("%s %d %s %q", path, st.ModTime().UnixNano(), strings.TrimSpace(string(boot)), iptables)
}

const (
	lockIptables = "iptables"
	lockNftables = "nftables"
	lockSkip     = "skip"
)

// chooseNetworkLock picks how CRIU keeps packets away while sockets are dumped:
// by iptables, its default, where the host has it; else by nftables where CRIU
// and the kernel can; else not at all, with which a dump of established TCP
// connections may lose packets, but works.
func chooseNetworkLock(ctx context.Context) string {
	if _, err := exec.LookPath("iptables-restore"); err == nil {
		return lockIptables
	}
	if _, err := criuOutput(ctx, "check", "--feature", "network_lock_nftables"); err == nil {
		return lockNftables
	}
	return lockSkip
}

// pluginsWithoutCUDA makes dir hold every CRIU plugin of the host but the CUDA
// plugin, which would run the CUDA steps a second time, and gives dir; "" when
// the host has no CUDA plugin and CRIU can use its own directory.
func pluginsWithoutCUDA(configured, dir string) (string, error) {
	from := configured
	if from == "" {
		from = os.Getenv("CRIU_LIBS_DIR")
	}
	if from == "" {
		for _, d := range criuPluginDirs {
			if _, err := os.Stat(filepath.Join(d, "cuda_plugin.so")); err == nil {
				from = d
				break
			}
		}
	}
	if from == "" {
		return "", nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", fmt.Errorf("set CRIU's CUDA plugin aside: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("set CRIU's CUDA plugin aside: %w", err)
	}
	plugins, err := filepath.Glob(filepath.Join(from, "*.so"))
	if err != nil {
		return "", fmt.Errorf("set CRIU's CUDA plugin aside: %w", err)
	}
	for _, p := range plugins {
		if filepath.Base(p) == "cuda_plugin.so" {
			continue
		}
		if err := os.Symlink(p, filepath.Join(dir, filepath.Base(p))); err != nil {
			return "", fmt.Errorf("set CRIU's CUDA plugin aside: %w", err)
		}
	}
	return dir, nil
}

// useCRIU puts the configured criu where runc looks for it, or leaves that to
// the $PATH that the shim was started with.
var useCRIU = func() func(node config.Node) {
	started := os.Getenv("PATH")
	return func(node config.Node) {
		path := started
		if node.CRIU.Path != "" {
			path = filepath.Dir(node.CRIU.Path) + string(os.PathListSeparator) + started
		}
		if path != os.Getenv("PATH") {
			os.Setenv("PATH", path)
		}
	}
}()

// checkCRIU refuses a host without CRIU, or with one that is too old.
func checkCRIU(ctx context.Context, node config.Node) error {
	useCRIU(node)
	if node.CRIU.Path != "" { // else the next one in $PATH would be taken
		if _, err := os.Stat(node.CRIU.Path); err != nil {
			return fmt.Errorf("[criu] path: %w: %w", err, errdefs.ErrFailedPrecondition)
		}
	}
	path, err := exec.LookPath("criu")
	if err != nil {
		return fmt.Errorf("no criu in $PATH: install CRIU %s or newer, or name it in [criu] path of %s: %w", criuMinimum, config.Path, errdefs.ErrFailedPrecondition)
	}
	out, err := criuOutput(ctx, "--version")
	if err != nil {
		return fmt.Errorf("ask %s for its version: %w", path, err)
	}
	version, err := parseCRIUVersion(out)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if older(version, criuMinimum) {
		return fmt.Errorf("%s is version %s, too old for GPU containers: install CRIU %s or newer, or name it in [criu] path of %s: %w",
			path, version, criuMinimum, config.Path, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// parseCRIUVersion reads "Version: 4.2.1" of `criu --version`.
func parseCRIUVersion(out string) (string, error) {
	for line := range strings.Lines(out) {
		if v, ok := strings.CutPrefix(line, "Version:"); ok {
			return strings.TrimSpace(v), nil
		}
	}
	return "", fmt.Errorf("no version in %q", out)
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

// criuOutput runs criu under the shim's reaper and gives its standard output.
func criuOutput(ctx context.Context, args ...string) (string, error) {
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "criu", args...)
	cmd.Stdout = &out
	exits, err := runc.Monitor.Start(cmd)
	if err != nil {
		return "", err
	}
	status, err := runc.Monitor.Wait(cmd, exits)
	if err != nil {
		return "", err
	}
	if status != 0 {
		return "", fmt.Errorf("criu %s: exit status %d", strings.Join(args, " "), status)
	}
	return out.String(), nil
}
