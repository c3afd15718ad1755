# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# The oldest containerd that is supported, which speaks to shims in the way of
# those before 2.3, and its ctr. Beside the newest, so under names of their own.

module=github.com/containerd/containerd/v2
version=$(pinned containerd-2.2 "$module")
inputs=(containerd-2.2/go.mod containerd-2.2/go.sum)
packages=()
programs=(containerd-2.2 ctr-2.2)

build() {
	local program
	CGO_ENABLED=0 go_build containerd-2.2 "$1" -tags "netgo osusergo static_build" \
		-ldflags "-s -w -X $module/version.Version=$version" \
		"$module/cmd/containerd" "$module/cmd/ctr"
	for program in "${programs[@]}"; do
		mv "$1/bin/${program%-2.2}" "$1/bin/$program"
	done
}
