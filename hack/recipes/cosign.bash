# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# cosign, which must take the signatures of checkpoints, and whose signatures must
# be taken. It takes five minutes of processor time to build.

module=github.com/sigstore/cosign/v2
version=$(pinned cosign "$module")
inputs=(cosign/go.mod cosign/go.sum)
packages=()
programs=(cosign)

build() {
	CGO_ENABLED=0 go_build cosign "$1" -ldflags "-s -w" "$module/cmd/cosign"
}
