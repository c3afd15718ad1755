# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# skopeo, a reader of images that is not containerd's: the distribution's own.
# Any version will do; it is not built here.

version=any
inputs=()
packages=()
programs=(skopeo)

system() {
	local path
	path=$(command -v skopeo) && path=$(readlink -f "$path") || return
	echo "$path v$("$path" --version | awk '{ print $NF }')"
}

system_plugins() { return 1; }

from_distribution() { install_packages skopeo; }

build() {
	echo "there is no skopeo, and no package of it" >&2
	return 1
}
