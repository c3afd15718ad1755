# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# iptables, with which CNI's plugins publish ports of nerdctl's containers: the
# distribution's own. Any version will do; it is not built here.

version=any
inputs=()
packages=()
programs=(iptables)

system() {
	local path
	path=$(command -v iptables) || return
	# Our own, by way of a PATH that holds what setup published.
	[[ $path != "$cache"/* ]] || path=$(readlink "$path")
	echo "$path $("$path" --version | awk '{ print $2 }')"
}

system_plugins() { return 1; }

from_distribution() { install_packages iptables; }

build() {
	echo "there is no iptables, and no package of it" >&2
	return 1
}
