# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154 # set and read by setup
#
# The cache of built tools. Each tool's build is a directory of its own, named
# after the tool, its version and a hash of its recipe. It appears by rename
# when the build has succeeded and is never changed after, so whoever sees one
# can use it; runs that want the same one wait for each other.
#
#	$cache/runc-v1.5.2-0a1b2c3d/bin/runc    a build
#	$cache/bin/runc                         link to the build last set up
#	$cache/criu-plugins                     link to the CUDA plugin's directory
#	$cache/log/                             what the builds printed

# entry: the name of the directory for the recipe that is loaded.
entry() {
	local hash
	hash=$({
		uname -m
		(cd "$hack" && cat -- "recipes/$tool.bash" "${inputs[@]}")
	} | sha256sum)
	echo "$tool-$version-${hash:0:8}"
}

# works DIR: whether a build is usable. Recipes may ask for more.
works() {
	local program
	for program in "${programs[@]}"; do
		[[ -x $1/bin/$program ]] || return
	done
}

# build_entry NAME: makes $cache/NAME unless another run did so meanwhile, and
# sets origin to say which. On an error nothing of it is left but its log.
build_entry() {
	local name=$1 log=$cache/log/$1.log lock status=0
	exec {lock}>"$cache/.$name.lock"
	if ! flock --nonblock "$lock"; then
		echo "$tool: waiting for another set-up that builds it" >&2
		flock "$lock"
	fi
	# Under the lock, what is here was left by a run that was killed.
	rm -rf "$cache/.build-$name".*
	origin=cached
	if ! works "$cache/$name"; then
		origin=built
		partial=$(mktemp -d "$cache/.build-$name.XXXXXX")
		trap 'rm -rf "$partial"' EXIT
		mkdir "$partial/out"
		# A shell of its own, because errexit is off in a tested command, and
		# without the lock, which a process left behind would go on holding.
		TMPDIR=$partial "$hack/setup" --build "$tool" "$partial/out" \
			>"$log" 2>&1 </dev/null {lock}>&- || status=$?
		if ((status)); then
			tail -n 30 "$log" >&2
			echo "$tool $version: not built; all that was printed is in $log" >&2
			return "$status"
		fi
		rm -rf "${cache:?}/$name"
		mv -T "$partial/out" "$cache/$name"
	fi
	exec {lock}>&-
}

# publish LINK TARGET: makes $cache/LINK point at TARGET, in one step.
publish() {
	[[ $(readlink "$cache/$1") != "$2" ]] || return 0
	ln -sfn "$2" "$cache/$1.$$"
	mv -fT "$cache/$1.$$" "$cache/$1"
}
