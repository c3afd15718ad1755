# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# The containerd before the newest, the first that starts shims in the new way, and
# its ctr. Beside the newest, so under names of their own.

module=github.com/containerd/containerd/v2
version=$(pinned containerd-2.3 "$module")
inputs=(containerd-2.3/go.mod containerd-2.3/go.sum)
packages=()
programs=(containerd-2.3 ctr-2.3)

build() {
	local program
	CGO_ENABLED=0 go_build containerd-2.3 "$1" -tags "netgo osusergo static_build" \
		-ldflags "-s -w -X $module/version.Version=$version" \
		"$module/cmd/containerd" "$module/cmd/ctr"
	for program in "${programs[@]}"; do
		mv "$1/bin/${program%-2.3}" "$1/bin/$program"
	done
}
