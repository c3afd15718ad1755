// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// criuConfig lets CRIU dump on a machine without iptables or nftables: no
// workload here has a connection whose packets would have to wait.
const criuConfig = "network-lock skip\n"

// needless are the daemon's plugins that nothing here uses, each with what it
// would do to the machine.
var needless = []string{
	"io.containerd.internal.v1.opt", // makes /opt/containerd
	"io.containerd.nri.v1.nri",      // listens in /var/run/nri
	"io.containerd.tracing.processor.v1.otlp",
	"io.containerd.snapshotter.v1.blockfile",
	"io.containerd.snapshotter.v1.btrfs",
	"io.containerd.snapshotter.v1.devmapper",
	"io.containerd.snapshotter.v1.erofs",
	"io.containerd.snapshotter.v1.zfs",
	"io.containerd.differ.v1.erofs",
}

// criPlugins make up the CRI service.
var criPlugins = []string{
	"io.containerd.grpc.v1.cri",
	"io.containerd.cri.v1.images",
	"io.containerd.cri.v1.runtime",
}

// OwnCNI is a part of the configuration with which a containerd that has CRI looks for networks in a directory of
// the test's: it makes the default one, /etc/cni/net.d.
func OwnCNI(t testing.TB) string {
	return fmt.Sprintf("[plugins.'io.containerd.cri.v1.runtime'.cni]\nconf_dir = %q\n", t.TempDir())
}

// writeConfig writes the configuration of the daemon, of the shim and of CRIU.
func (c *Containerd) writeConfig() error {
	disabled := needless
	if !c.opts.CRI {
		disabled = append(append([]string{}, needless...), criPlugins...)
	}
	level := "info"
	if c.opts.Debug {
		level = "debug"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "version = 3\n")
	fmt.Fprintf(&b, "root = %q\nstate = %q\ntemp = %q\n", c.home.root(), c.home.state(), c.home.temp())
	fmt.Fprintf(&b, "imports = []\n") // the default reads /etc/containerd
	fmt.Fprintf(&b, "disabled_plugins = [\n")
	for _, plugin := range disabled {
		fmt.Fprintf(&b, "  %q,\n", plugin)
	}
	fmt.Fprintf(&b, "]\n[grpc]\naddress = %q\n[debug]\nlevel = %q\n", c.home.socket(), level)
	b.WriteString(c.opts.Config)
	if c.opts.ConfigIn != nil {
		b.WriteString(c.opts.ConfigIn(c.home.dir))
	}

	for path, text := range map[string]string{
		c.home.config():     b.String(),
		c.home.shimConfig(): c.opts.ShimConfig,
		c.CRIUConfigPath():  criuConfig,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return fmt.Errorf("write containerd's configuration: %w", err)
		}
	}
	return nil
}

// tryOverlay says why no overlay can be mounted with its directories in dir, or
// nil when it can: some file systems, an overlay among them, cannot hold one.
func tryOverlay(dir string) error {
	base, err := os.MkdirTemp(dir, "overlay")
	if err != nil {
		return err
	}
	defer os.RemoveAll(base)
	var paths []string
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		path := filepath.Join(base, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			return err
		}
		paths = append(paths, path)
	}
	data := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", paths[0], paths[1], paths[2])
	if err := unix.Mount("overlay", paths[3], "overlay", 0, data); err != nil {
		return fmt.Errorf("mount an overlay in %s: %w", dir, err)
	}
	if err := unix.Unmount(paths[3], unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the overlay in %s: %w", dir, err)
	}
	return nil
}
