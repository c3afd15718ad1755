# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # read and set by setup
#
# The static tests of CRIU's own suite, zdtm, out of the source archive of the CRIU
# that we ship: bin/zdtm/ has their programs and descriptions, and the command line
# of each in the file `commands`. integration/zdtm runs them.

# shellcheck source=../versions source-path=SCRIPTDIR
source "$hack/versions"
version=v$CRIU_VERSION
# Linked with the distribution's libraries, so not to be shared between
# releases of it.
inputs=(versions criu-source /etc/os-release)
packages=(gcc libc6-dev make pkg-config xz-utils libaio-dev libcap-dev libnl-3-dev libnl-route-3-dev)
programs=(zdtm)

build() {
	local out=$1 source static
	source=$(mktemp -d)
	"$hack/criu-source" "$source/criu.tar.xz"
	tar -xf "$source/criu.tar.xz" -C "$source" --strip-components 1
	static=$source/test/zdtm/static
	# What an outer make was told is not meant for CRIU's.
	unset MAKEFLAGS MFLAGS MAKEOVERRIDES MAKELEVEL ARCH DEBUG V
	# Tests that need a library which is rarely there, such as libbpf, are not built: integration/zdtm says so.
	make -C "$static" -k -j"$(nproc)" || true
	mkdir -p "$out/bin/zdtm"
	# What the suite itself would start.
	{ make -C "$static" -k -n start || true; } | grep '^\./.* --pidfile=' >"$out/bin/zdtm/commands"
	cut -d' ' -f1 "$out/bin/zdtm/commands" | while read -r program; do
		[[ ! -x $static/$program ]] || install -s -t "$out/bin/zdtm" "$static/$program"
	done
	cp "$static"/*.desc "$out/bin/zdtm"
	install -m 644 -t "$out" "$source/COPYING"
}
