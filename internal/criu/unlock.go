// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// unlockTimeout bounds Unlock: iptables waits for others that use it.
const unlockTimeout = 10 * time.Second

// Unlock removes what keeps packets away from the container of a bundle after a dump whose CRIU was killed, and
// reports whether there was anything: only CRIU itself would have removed it. init is the container's first process,
// which may have ended. In the host's own network CRIU keeps single connections away, which stay so.
func Unlock(ctx context.Context, r Runner, dir string, init int) (removed bool, err error) {
	told, err := os.ReadFile(filepath.Join(dir, SettingsName))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil // CRIU has not dumped it
	}
	if err != nil {
		return false, err
	}
	file, err := bundle.Read(dir)
	if err != nil {
		return false, err
	}
	network := specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: fmt.Sprintf("/proc/%d/ns/net", init)}
	if file.Spec.Linux != nil {
		for _, ns := range file.Spec.Linux.Namespaces {
			if ns.Type == specs.NetworkNamespace && ns.Path != "" { // a pod's, which stays when the container ends
				network = ns
			}
		}
	}
	if !host.HasFile(network.Path) || host.OwnsNamespace(network) {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unlockTimeout)
	defer cancel()
	err = host.InNetwork(network.Path, func() (err error) {
		switch optionValue(string(told), "network-lock") {
		case LockSkip:
		case LockNftables:
			removed, err = removeTables()
		default: // iptables, unless CRIU was built for nftables
			if removed, err = removeChains(ctx, r); err == nil && !removed {
				removed, _ = removeTables() // which the kernel may not have
			}
		}
		return err
	})
	if err != nil {
		return removed, fmt.Errorf("remove by hand the chains or tables named CRIU in the network %s, which keep packets away: %w", network.Path, err)
	}
	return removed, nil
}

// mostJumps bounds how often a chain jumps to CRIU's: once for each dump that was killed.
const mostJumps = 16

// removeChains removes CRIU's chains, and the jumps to them, from the thread's network.
func removeChains(ctx context.Context, r Runner) (removed bool, err error) {
	for _, name := range []string{"iptables", "ip6tables"} {
		program, missing := r.Look(name)
		if missing != nil || name == "ip6tables" && !host.HasFile("/proc/sys/net/ipv6") { // nor has CRIU used it
			continue
		}
		if _, _, none := r.Run(ctx, program, "-w", "-F", "CRIU"); none != nil { // packets pass from here on
			if !strings.HasSuffix(none.Error(), "exit status 1") { // which says that there is no such chain
				err = errors.Join(err, none)
			}
			continue
		}
		removed = true
		for _, from := range []string{"INPUT", "OUTPUT"} {
			for range mostJumps {
				if _, _, none := r.Run(ctx, program, "-w", "-D", from, "-j", "CRIU"); none != nil {
					break
				}
			}
		}
		_, _, left := r.Run(ctx, program, "-w", "-X", "CRIU")
		err = errors.Join(err, left)
	}
	return removed, err
}
