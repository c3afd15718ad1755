# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154 # set by setup
#
# The distribution's packages: the only thing here that touches the system.
# $cache is setup's directory; who sources this without setup gets the same.
: "${cache:=${GPUCKPT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpuckpt}}"

# install_packages NAME...: installs those that are missing. Where that cannot
# be done it says which they are and fails.
install_packages() {
	local -a missing=()
	local name lock
	for name in "$@"; do
		[[ $(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || missing+=("$name")
	done
	((${#missing[@]})) || return 0

	if ! command -v apt-get >/dev/null; then
		echo "missing, and there is no apt-get to install them with (Debian's names): ${missing[*]}" >&2
		return 1
	fi
	if ((EUID != 0)); then
		echo "missing, and only root can install them: apt-get install ${missing[*]}" >&2
		return 1
	fi
	mkdir -p "$cache"
	exec {lock}>"$cache/.apt.lock"
	flock "$lock"
	# The package lists may be absent (a fresh image) or name files that are
	# gone: they are renewed once, and only then.
	local done=0
	apt_install "${missing[@]}" || { apt_get update && apt_install "${missing[@]}"; } || done=$?
	exec {lock}>&-
	return "$done"
}

apt_install() { apt_get install -y --no-install-recommends "$@"; }

# The lock timeout, in seconds, is for a machine that is just updating itself.
apt_get() {
	DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
		apt-get -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@" </dev/null
}
