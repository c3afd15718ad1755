# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# ip connects the machines of a test's cluster, and tc, beside it, limits what they get. The
# machine's own is taken, or its distribution's; none is built.

version=any
inputs=()
packages=()
programs=(ip)

system() {
	local path
	path=$(command -v ip) || return
	# Our own, by way of a PATH that holds what setup published.
	[[ $path != "$cache"/* ]] || path=$(readlink "$path")
	echo "$path $("$path" -V | awk '{ print $3 }')"
}

system_plugins() { return 1; }

from_distribution() { install_packages iproute2; }

build() {
	echo "there is no ip, and no package of it" >&2
	return 1
}
