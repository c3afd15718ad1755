# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# runc as upstream releases it: static, with seccomp. It needs cgo, because its
# first steps inside a namespace are C.

module=github.com/opencontainers/runc
version=$(pinned tools "$module")
inputs=(tools/go.mod tools/go.sum)
packages=(gcc libc6-dev pkg-config libseccomp-dev)
programs=(runc)

build() {
	CGO_ENABLED=1 go_build tools "$1" -tags "netgo osusergo seccomp urfave_cli_no_docs" \
		-buildmode=pie -ldflags "-s -w -linkmode external -extldflags -static-pie" "$module"
}
