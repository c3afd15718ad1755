# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# helm, which installs the chart of a release in `make test-release`.

module=helm.sh/helm/v3
version=$(pinned helm "$module")
inputs=(helm/go.mod helm/go.sum)
packages=()
programs=(helm)

build() {
	CGO_ENABLED=0 go_build helm "$1" -ldflags "-s -w" "$module/cmd/helm"
}
