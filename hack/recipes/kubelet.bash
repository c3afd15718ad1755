# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# The kubelet, for the tests of pods. In a module of its own, so that the
# hundreds of modules of Kubernetes do not choose containerd's. Static: one build
# runs on every distribution of the same architecture.

module=k8s.io/kubernetes
version=$(pinned kubelet "$module")
inputs=(kubelet/go.mod kubelet/go.sum)
packages=()
programs=(kubelet)

build() {
	CGO_ENABLED=0 go_build kubelet "$1" -tags "netgo osusergo" \
		-ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" \
		"$module/cmd/kubelet"
}
