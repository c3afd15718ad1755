# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154 # set by setup
#
# Programs built from the module proxy, each group pinned by a go.mod here.

# pinned GROUP MODULE: the version that GROUP/go.mod requires.
pinned() {
	awk -v module="$2" '$1 == module && NF > 1 { print $2 }' "$hack/$1/go.mod"
}

# go_build GROUP OUT ARGUMENT...: builds into OUT/bin, for this machine.
# Nothing but what go.mod and go.sum pin is used, and neither is changed.
go_build() {
	local group=$1 out=$2
	shift 2
	mkdir -p "$out/bin"
	env -u GOOS -u GOARCH GOWORK=off \
		go -C "$hack/$group" build -mod=readonly -buildvcs=false -trimpath -o "$out/bin/" "$@"
}
