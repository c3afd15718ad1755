// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package installcmd is the sub-commands "gpuckpt install" and "gpuckpt uninstall".
package installcmd

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/internal/cli/doctor"
	"github.com/gpuckpt/gpuckpt/internal/cli/installcmd/install"
)

// installFlags are the flags of install and uninstall.
type installFlags struct {
	install.Options
	json bool
}

// Install returns the command "install".
func Install() *cobra.Command {
	var o installFlags
	c := &cobra.Command{
		Use:   "install",
		Short: "Install gpuckpt on this node and make containerd know it",
		Long: `Install gpuckpt on this node and make containerd know it.

It copies the programs of this program's release below a prefix, and adds the runtime "gpuckpt" to
containerd's configuration. That is a file in conf.d, an import where containerd does not read that
directory, or the template of k3s and RKE2. If containerd's configuration then differs in anything
else, it is left as it was.

Run it again to upgrade. Containers that run keep the programs that they were started with.
containerd must be restarted once to read its configuration: by --restart, or by you. A restart
leaves containers running, suspended ones too.`,
		Example: `  gpuckpt install --restart
  gpuckpt install --prefix /opt/gpuckpt
  gpuckpt install --without-containerd     # for ctr and nerdctl alone`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Source, err = ReleaseOf(); err != nil {
				return err
			}
			result, err := install.Install(cmd.Context(), o.Options)
			if err != nil {
				return err
			}
			return o.finish(cmd, result, "installed")
		},
	}
	o.flags(c)
	c.Flags().StringVar(&o.Prefix, "prefix", "", "directory to install below (default: the last one, else the first of "+strings.Join(install.Prefixes, ", ")+" that can be written)")
	c.Flags().StringVar(&o.Config, "containerd-config", "", "containerd's configuration (default: that of k3s or RKE2, else /etc/containerd/config.toml)")
	c.Flags().StringVar(&o.Containerd, "containerd", "", "containerd's program (default: the first in the usual directories)")
	c.Flags().BoolVar(&o.WithoutContainerd, "without-containerd", false, "leave containerd's configuration alone; ctr and nerdctl need no change of it")
	c.Flags().StringVar(&o.Settings, "settings", "", "directory with what configures the node: config.toml, and keys, recipients, decryption-keys with directories of files (default: leave the node's settings alone)")
	_ = c.MarkFlagDirname("prefix")
	_ = c.MarkFlagDirname("settings")
	return c
}

// Uninstall returns the command "uninstall".
func Uninstall() *cobra.Command {
	var o installFlags
	c := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove from this node what gpuckpt install put there",
		Long: `Remove from this node what gpuckpt install put there: its programs, and its part of containerd's
configuration. It refuses while containers run with the shim.`,
		Example: `  gpuckpt uninstall --restart`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			result, err := install.Uninstall(cmd.Context(), o.Options)
			if err != nil {
				return err
			}
			return o.finish(cmd, result, "uninstalled")
		},
	}
	o.flags(c)
	c.Flags().BoolVar(&o.Force, "force", false, "uninstall while containers run with the shim: they run on, but can be neither checkpointed nor resumed")
	return c
}

// Wait returns a command that waits for SIGTERM: what the DaemonSet's pods do when the node is done.
func Wait() *cobra.Command {
	return &cobra.Command{Use: "wait", Short: "Wait for SIGTERM", Hidden: true, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		<-cmd.Context().Done()
		return nil
	}}
}

func (o *installFlags) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.Root, "root", "/", "where the node's root is mounted")
	f.BoolVar(&o.Restart, "restart", false, "restart containerd if its configuration changed")
	f.StringVar(&o.RestartCommand, "restart-command", "", "shell command for that (default: systemctl restart of containerd, k3s or RKE2)")
	f.StringVar(&o.Record, "record", "", "where to keep what was installed")
	_ = f.MarkHidden("record") // tests have their own
	f.BoolVar(&o.json, "json", false, "print JSON")
	_ = c.MarkFlagDirname("root")
}

// finish prints what was done.
func (o *installFlags) finish(cmd *cobra.Command, r install.Result, done string) error {
	if o.json {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(r)
	}
	var b strings.Builder
	switch {
	case r.Prefix == "":
		b.WriteString("nothing is installed\n")
	case len(r.Changed) == 0:
		fmt.Fprintf(&b, "gpuckpt %s was %s in %s already\n", r.Version, done, r.Prefix)
	default:
		fmt.Fprintf(&b, "%s gpuckpt %s in %s: %s changed\n", done, r.Version, r.Prefix, doctor.Count(len(r.Changed), "file"))
	}
	if r.Config != "" {
		fmt.Fprintf(&b, "containerd knows the runtime by %s\n", r.Config)
	}
	if r.Restart {
		b.WriteString("restart containerd to have it read its configuration; containers live on\n")
	}
	_, err := io.WriteString(cmd.OutOrStdout(), b.String())
	return err
}

// ReleaseOf returns the directory of the release that this program lies in, in bin.
func ReleaseOf() (string, error) {
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	return filepath.Dir(filepath.Dir(self)), err
}
