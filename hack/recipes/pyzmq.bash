# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# pyzmq, with which kernels such as Jupyter's talk: the distribution's own, and the
# distribution's Python, which finds it. Any version will do; it is not built here.

version=any
inputs=()
packages=()
programs=(python3-zmq)

system() {
	local path=/usr/bin/python3 found
	found=$("$path" -c 'import zmq; print(zmq.__version__)' 2>/dev/null) || return
	echo "$path v$found"
}

system_plugins() { return 1; }

from_distribution() { install_packages python3 python3-zmq; }

build() {
	echo "there is no pyzmq, and no package of it" >&2
	return 1
}
