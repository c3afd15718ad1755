// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
)

// The ways in which CRIU keeps packets away while it dumps sockets.
const (
	LockIptables = "iptables" // CRIU's default
	LockNftables = "nftables"
	LockSkip     = "skip" // a dump of established TCP connections may lose packets, but works
)

// NetworkLock returns the way that works on the node: by iptables where there is
// such a program, whose path it returns, else by nftables where CRIU and the kernel
// can, else none.
func NetworkLock(ctx context.Context, r Runner, criu string) (method, iptables string) {
	if path, err := r.Look("iptables-restore"); err == nil {
		return LockIptables, path
	}
	if _, _, err := r.Run(ctx, criu, "check", "--feature", "network_lock_nftables"); err == nil {
		return LockNftables, ""
	}
	return LockSkip, ""
}

// networkLockCache keeps the answer for other shims: asking CRIU takes a tenth of a
// second, as long as a small dump.
const networkLockCache = "/run/gpuckpt/network-lock"

// cachedNetworkLock is NetworkLock, asked once for each CRIU and boot.
func cachedNetworkLock(ctx context.Context, r Runner, criu string) string {
	key := networkLockKey(r, criu)
	if cached, err := os.ReadFile(networkLockCache); err == nil && key != "" {
		method, ok := strings.CutPrefix(string(cached), key+" ")
		if ok && slices.Contains([]string{LockIptables, LockNftables, LockSkip}, method) {
			return method
		}
	}
	method, _ := NetworkLock(ctx, r, criu)
	if key != "" {
		remember(ctx, networkLockCache, key+" "+method)
	}
	return method
}

// networkLockKey names what an answer depends on: CRIU, the boot, and iptables. It
// is "" where the answer is not to be kept.
func networkLockKey(r Runner, criu string) string {
	st, err := os.Stat(criu)
	boot, berr := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil || berr != nil {
		return ""
	}
	iptables, _ := r.Look("iptables-restore")
	return fmt.Sprintf("%s %d %s %q", criu, st.ModTime().UnixNano(), strings.TrimSpace(string(boot)), iptables)
}
