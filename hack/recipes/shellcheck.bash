# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# The linter of the scripts here, which `make lint` runs: the distribution's own.
# Any version will do; it is not built here.

version=any
inputs=()
packages=()
programs=(shellcheck)

system() {
	local path
	path=$(command -v shellcheck) && path=$(readlink -f "$path") || return
	echo "$path v$("$path" --version | awk '/^version:/ { print $2 }')"
}

system_plugins() { return 1; }

from_distribution() { install_packages shellcheck; }

build() {
	echo "there is no shellcheck, and no package of it" >&2
	return 1
}
