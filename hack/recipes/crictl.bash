# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# crictl, the client of the kubelet's side of containerd.

module=sigs.k8s.io/cri-tools
version=$(pinned cri "$module")
inputs=(cri/go.mod cri/go.sum)
packages=()
programs=(crictl)

build() {
	CGO_ENABLED=0 go_build cri "$1" -ldflags "-s -w -X $module/pkg/version.Version=${version#v}" "$module/cmd/crictl"
}
