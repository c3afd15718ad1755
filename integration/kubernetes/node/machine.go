// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// systemctl stands for systemd's on a machine: it knows containerd's unit, and has whoever plays systemd
// restart it.
const systemctl = `#!/bin/sh
case "$1" in
is-active) [ "$3" = containerd ] ;;
show) echo process ;;
restart) touch %[1]s/asked; while [ ! -e %[1]s/done ]; do sleep 0.05; done; rm %[1]s/done ;;
*) exit 1 ;;
esac
`

// furnish gives a machine what nodes have: containerd's program in $PATH, a systemctl, and the authority
// whose certificate the registry has.
func (n *Node) furnish() error {
	program, err := n.opts.Bins.Path("containerd")
	if err != nil {
		return err
	}
	certificate, err := os.ReadFile(n.authority.path("ca"))
	if err != nil {
		return fmt.Errorf("furnish a machine: %w", err)
	}
	bin, roots := n.InMachine("/usr/local/bin"), n.InMachine("/etc/ssl/certs/ca-certificates.crt")
	had, _ := os.ReadFile(roots) // a machine without has the registry's alone
	err = errors.Join(
		os.Symlink(program, filepath.Join(bin, "containerd")),
		os.WriteFile(filepath.Join(bin, "systemctl"), fmt.Appendf(nil, systemctl, n.Dir()), 0o755), //nolint:gosec // a program
		os.MkdirAll(filepath.Dir(roots), 0o755),
		os.RemoveAll(roots), os.WriteFile(roots, append(had, certificate...), 0o644),
		os.MkdirAll(n.InMachine("/etc/kubernetes/node-feature-discovery/features.d"), 0o755),
	)
	if err != nil {
		return fmt.Errorf("furnish a machine: %w", err)
	}
	return nil
}

// Systemd restarts a machine's containerd when it is asked to, until the context ends. restarted is
// called each time.
func (n *Node) Systemd(ctx context.Context, restarted func()) error {
	for pause(ctx, 50*time.Millisecond) == nil {
		if os.Remove(filepath.Join(n.Dir(), "asked")) != nil {
			continue
		}
		if err := n.Restart(ctx); err != nil {
			return err
		}
		restarted()
		if err := os.WriteFile(filepath.Join(n.Dir(), "done"), nil, 0o600); err != nil {
			return fmt.Errorf("say that containerd was restarted: %w", err)
		}
	}
	return nil
}

// machineKubelet has the kubelet's command run in the machine, in the place of the kernel's settings
// that it changes files of the machine's own.
func (n *Node) machineKubelet(cmd *exec.Cmd) *exec.Cmd {
	const own = `for file in "$1"/*; do mount --bind "$file" "/proc/sys/$(basename "$file" | tr . /)"; done; shift; exec "$@"`
	cmd.Args = append([]string{"sh", "-ec", own, "sh", n.settings(), cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
	return n.MachineCommand(cmd)
}
