# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# Checks the workflows in .github.

module=github.com/rhysd/actionlint
version=$(pinned actionlint "$module")
inputs=(actionlint/go.mod actionlint/go.sum)
packages=()
programs=(actionlint)

build() {
	CGO_ENABLED=0 go_build actionlint "$1" -ldflags "-s -w" "$module/cmd/actionlint"
}
