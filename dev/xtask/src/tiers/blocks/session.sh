#!/bin/bash
# Runs the steps of a session, as described in dev/xtask/src/tiers/blocks/session.rs, in the session's directory.
set -u
dir=$PWD
export STEPS=$dir/steps
server=

stop() {
	[ -n "$server" ] || return 0
	kill "$server" 2>/dev/null
	wait "$server" 2>/dev/null
	server=
}

# start NN: starts a program that keeps running, and waits until its port accepts connections.
start() {
	stop
	(
		. "$dir/environment"
		cd "$(cat "$dir/directory")" || exit
		. "$STEPS/$1.server"
	) >"$dir/out/$1.out" 2>"$dir/out/$1.err" </dev/null &
	server=$!
	local port
	port=$(cat "$STEPS/$1.port")
	for _ in $(seq 1200); do
		(: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null && return 0
		kill -0 "$server" 2>/dev/null || return 1
		sleep 0.05
	done
	return 1
}

# run NN: runs a step to its end. The next step inherits its exports and its current directory.
run() {
	timeout --kill-after=10 300 bash -eu -o pipefail -c '
		. "$1/environment"
		cd "$(cat "$1/directory")"
		. "$STEPS/$2.sh"
		export -p >"$1/environment"
		pwd >"$1/directory"' step "$dir" "$1" >"$dir/out/$1.out" 2>"$dir/out/$1.err" </dev/null
}

trap stop EXIT
export -p >"$dir/environment"
echo "$dir/work" >"$dir/directory"
for step in "$STEPS"/*.sh "$STEPS"/*.server; do echo "$step"; done | grep -v '\*' | sort >"$dir/order"
while read -r step; do
	number=$(basename "${step%.*}")
	began=$(date +%s%N)
	case $step in
	*.server) start "$number" ;;
	*) run "$number" ;;
	esac
	status=$?
	awk -v ns=$(($(date +%s%N) - began)) 'BEGIN { printf "%.1f\n", ns / 1e9 }' >"$dir/out/$number.seconds"
	echo "$status" >"$dir/out/$number.status"
	# 5: the host was too busy for a measurement.
	[ "$status" = 0 ] || [ "$status" = 5 ] || break
	grep -E '^export [A-Z0-9_]+=' "$dir/out/$number.out" >>"$dir/environment"
done <"$dir/order"
exit 0
