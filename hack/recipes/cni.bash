# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# The CNI plugins that give the tests' pods, and nerdctl's containers, networks of
# their own.

module=github.com/containernetworking/plugins
version=$(pinned cri "$module")
inputs=(cri/go.mod cri/go.sum)
packages=()
programs=(bridge firewall host-local loopback portmap tuning)

build() {
	CGO_ENABLED=0 go_build cri "$1" -ldflags "-s -w -X $module/pkg/utils/buildversion.BuildVersion=$version" \
		"$module/plugins/main/bridge" "$module/plugins/main/loopback" \
		"$module/plugins/ipam/host-local" "$module/plugins/meta/firewall" \
		"$module/plugins/meta/portmap" "$module/plugins/meta/tuning"
}
