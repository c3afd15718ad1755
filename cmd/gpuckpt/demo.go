// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/internal/cli/installcmd"
)

func demoCommand() *cobra.Command {
	var keep bool
	c := &cobra.Command{
		Use:   "demo",
		Short: "Show a checkpoint and a restore, without a GPU",
		Long: `Show a checkpoint and a restore of a container that counts in GPU memory.

It uses a GPU of this machine, or else a software GPU. It starts a containerd of its own, and stops it
at the end, or with --keep at Ctrl-C. Its programs come in the package gpuckpt-demo.`,
		Example: `  gpuckpt demo
  gpuckpt demo --keep     # and try ctr and gpuckpt in another terminal`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			release, err := installcmd.ReleaseOf()
			if err != nil {
				return err
			}
			lib := filepath.Join(release, "lib", "gpuckpt")
			program := filepath.Join(lib, "demo", "demo")
			if _, err := os.Stat(program); err != nil {
				return fmt.Errorf("the demo is not installed: install the package gpuckpt-demo, or unpack its archive over %s (in a clone, make demo runs it): %w", release, err)
			}
			dirs := []string{filepath.Join(release, "bin"), lib, filepath.Join(lib, "criu"), filepath.Join(lib, "demo")}
			env := append(os.Environ(), "GPUCKPT_BIN="+strings.Join(dirs, string(os.PathListSeparator)))
			args := []string{program}
			if keep {
				args = append(args, "--keep")
			}
			return fmt.Errorf("start %s: %w", program, syscall.Exec(program, args, env))
		},
	}
	c.Flags().BoolVar(&keep, "keep", false, "leave containerd and the restored container running until Ctrl-C, to try things")
	return c
}
