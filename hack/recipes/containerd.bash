# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# containerd, ctr, and runc's own shim, which is what ours is compared with.
# Static: one build runs on every distribution of the same architecture.

module=github.com/containerd/containerd/v2
version=$(pinned tools "$module")
inputs=(tools/go.mod tools/go.sum)
packages=()
programs=(containerd ctr containerd-shim-runc-v2)

build() {
	CGO_ENABLED=0 go_build tools "$1" -tags "netgo osusergo static_build" \
		-ldflags "-s -w -X $module/version.Version=$version" \
		"$module/cmd/containerd" "$module/cmd/ctr" "$module/cmd/containerd-shim-runc-v2"
}
