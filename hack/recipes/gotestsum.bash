# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# Runs go test, prints the failures last, and tries a failed test again.

module=gotest.tools/gotestsum
version=$(pinned testsum "$module")
inputs=(testsum/go.mod testsum/go.sum)
packages=()
programs=(gotestsum)

build() {
	CGO_ENABLED=0 go_build testsum "$1" -ldflags "-s -w" "$module"
}
