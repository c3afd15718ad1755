# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# nerdctl. Its command imports helpers for its own tests, which need a module
# that is not released. So it is built in a copy without them, with its own
# go.mod and go.sum; nerdctl/go.sum pins the whole of the copy.

module=github.com/containerd/nerdctl/v2
version=$(pinned nerdctl "$module")
inputs=(nerdctl/go.mod nerdctl/go.sum)
packages=()
programs=(nerdctl)

build() {
	local released source tigron=github.com/containerd/nerdctl/mod/tigron
	released=$(GOWORK=off go -C "$hack/nerdctl" mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
	[[ $released ]]
	source=$(mktemp -d)
	cp -R "$released/." "$source"
	chmod -R u+w "$source"
	rm "$source"/cmd/nerdctl/helpers/testing*.go
	(
		cd "$source" || exit
		export GOWORK=off CGO_ENABLED=0
		go mod edit -droprequire "$tigron" -dropreplace "$tigron@v0.0.0"
		mkdir -p "$1/bin"
		env -u GOOS -u GOARCH go build -mod=readonly -buildvcs=false -trimpath \
			-ldflags "-s -w -X $module/pkg/version.Version=$version" -o "$1/bin/" ./cmd/nerdctl
	)
}
