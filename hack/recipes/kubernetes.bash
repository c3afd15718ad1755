# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# A cluster of one node for the tests: the kubelet, the API server with its etcd,
# the controllers and kubectl, in one program under five names (kubernetes/main.go).
# In a module of its own, so that the hundreds of modules of Kubernetes do not choose
# containerd's. Static: one build runs on every distribution of the same
# architecture.

module=k8s.io/kubernetes
version=$(pinned kubernetes "$module")
inputs=(kubernetes/go.mod kubernetes/go.sum kubernetes/main.go)
packages=()
programs=(kubelet kube-apiserver kube-controller-manager kubectl etcd)

build() {
	local program
	CGO_ENABLED=0 go_build kubernetes "$1" -tags "netgo osusergo" \
		-ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" .
	for program in "${programs[@]}"; do
		ln -s kubernetes "$1/bin/$program"
	done
}
