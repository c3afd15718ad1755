# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Shared libraries that go with a program to machines where nothing can be installed.

# libraries FILE: "name path" of each it needs, those of its libraries included.
libraries() { env -i ldd "$1" | awk '$2 == "=>" { print $1, $3 }'; }

# of_target NAME: what the target's own glibc and C++ supply.
of_target() {
	case $1 in
	libc.so.* | libm.so.* | ld-linux*.so.* | libpthread.so.* | libdl.so.* | librt.so.* | \
		libresolv.so.* | libutil.so.* | libanl.so.* | libnsl.so.* | libmvec.so.* | \
		libstdc++.so.* | libgcc_s.so.*) return 0 ;;
	esac
	return 1
}

# gather FILE DIR: puts the libraries that FILE needs into DIR, each of which looks for its own beside
# itself.
gather() {
	local name path
	while read -r name path; do
		of_target "$name" || install -D -m 755 "$path" "$2/$name"
	done < <(libraries "$1")
	strip --strip-unneeded "$2"/*
	for path in "$2"/*; do
		patchelf --force-rpath --set-rpath "\$ORIGIN" "$path"
	done
}

# complete DIR FILE...: what is left to go wrong is seen here and not on the target: a library of a
# FILE that is missing, or that comes from this machine and not from DIR.
complete() {
	local dir=$1 file name path
	shift
	for file in "$@"; do
		while read -r name path; do
			of_target "$name" || [[ $(readlink -f "$path") == "$(readlink -f "$dir")"/* ]] || {
				echo "${0##*/}: $file gets $name from $path" >&2
				return 1
			}
		done < <(libraries "$file")
	done
}
