# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# What the tests hold checkpoint images and archives against: distribution's
# registry, and checkpointctl. In a module of their own, so that their
# dependencies do not choose containerd's.

module=github.com/distribution/distribution/v3
version=$(pinned imagetools "$module")
inputs=(imagetools/go.mod imagetools/go.sum)
packages=()
programs=(registry checkpointctl)

build() {
	CGO_ENABLED=0 go_build imagetools "$1" -ldflags "-s -w" \
		"$module/cmd/registry" github.com/checkpoint-restore/checkpointctl
}
