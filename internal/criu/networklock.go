// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import "context"

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

// cachedNetworkLock is NetworkLock, where CRIU is asked once.
func cachedNetworkLock(ctx context.Context, r Runner, criu, cache string) string {
	if _, err := r.Look("iptables-restore"); err == nil {
		return LockIptables
	}
	method, _ := once(ctx, criu, cache, func() (string, error) {
		method, _ := NetworkLock(ctx, r, criu)
		return method, ctx.Err() // what a client has given up is no answer to keep
	})
	return method
}
