# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# CRIU, and its CUDA plugin (the peer that ours is measured against). The plugin
# goes to plugins/, where CRIU does not look unless --libdir, `libdir` in its
# configuration file or CRIU_LIBS_DIR says so: in CRIU's own directory it would
# act a second time, behind the shim's back.

# shellcheck source=../versions source-path=SCRIPTDIR
source "$hack/versions"
version=v$CRIU_VERSION
# Linked with the distribution's libraries, so not to be shared between
# releases of it.
inputs=(versions criu-source /etc/os-release)
packages=(gcc libc6-dev make pkg-config xz-utils
	libprotobuf-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler
	libnl-3-dev libcap-dev libnet1-dev libgnutls28-dev libnftables-dev libbsd-dev uuid-dev)
programs=(criu)

new_enough() { # VERSION
	[[ -n $1 ]] && printf '%s\n' "$CRIU_MIN_VERSION" "$1" | sort -VC
}

# system prints the installed CRIU's path and version if it is new enough.
system() {
	local path found
	path=$(command -v criu) && path=$(readlink -f "$path") || return
	# Our own, by way of a PATH that holds what setup published.
	[[ $path != "$(readlink -f "$cache")"/* ]] || return
	found=$("$path" --version | awk '/^Version:/ { print $2 }') && new_enough "$found" || return
	echo "$path v$found"
}

# from_distribution installs the distribution's CRIU if it is new enough.
from_distribution() {
	local candidate
	candidate=$(apt-cache policy criu | awk '/Candidate:/ { print $2 }') || return
	[[ $candidate != "(none)" ]] && new_enough "${candidate%%-*}" || return
	install_packages criu
}

# system_plugins prints the directory with the distribution's CUDA plugin.
system_plugins() {
	local plugin
	plugin=$(dpkg-query -L criu criu-cuda-plugin 2>/dev/null | grep '/cuda_plugin\.so$') || return
	dirname "$plugin"
}

# A cached CRIU is only good while the libraries it was linked with are there.
works() {
	"$1/bin/criu" --version >/dev/null 2>&1 && [[ -r $1/plugins/cuda_plugin.so ]]
}

build() {
	local out=$1 source
	source=$(mktemp -d)
	"$hack/criu-source" "$source/criu.tar.xz"
	tar -xf "$source/criu.tar.xz" -C "$source" --strip-components 1
	# What an outer make was told is not meant for CRIU's.
	unset MAKEFLAGS MFLAGS MAKEOVERRIDES MAKELEVEL ARCH DEBUG V
	make -C "$source" -j"$(nproc)" criu
	make -C "$source" cuda_plugin
	install -D -t "$out/bin" "$source/criu/criu"
	install -D -t "$out/plugins" "$source/plugins/cuda/cuda_plugin.so"
	install -D -m 644 -t "$out" "$source/COPYING"
}
