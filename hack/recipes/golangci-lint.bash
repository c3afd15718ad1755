# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# The linter. In a module of its own, so that its thousand dependencies do not
# choose containerd's, and not among the tools set up by default: only the lint
# needs it.

module=github.com/golangci/golangci-lint/v2
version=$(pinned lint "$module")
inputs=(lint/go.mod lint/go.sum)
packages=()
programs=(golangci-lint)

build() {
	CGO_ENABLED=0 go_build lint "$1" -ldflags "-s -w -X main.version=${version#v}" \
		"$module/cmd/golangci-lint"
}
