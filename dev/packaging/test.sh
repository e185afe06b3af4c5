#!/bin/bash
# The tier `package`: installs, upgrades, removes and purges the package in a fresh Debian with its own systemd.
#
#   test.sh OLD.deb NEW.deb INTERPRETER.deb DIR [SESSION…]
#
# DIR keeps the fresh root for the next run. The variable SUITE selects a Debian release other than bookworm.
# SESSION is a directory with the steps of a document (dev/xtask/src/tiers/blocks/session.rs), which run in the
# machine after the purge. Needs root, KVM, mmdebstrap, curl and systemd-nspawn (package systemd-container). Each
# check prints a line on standard output: `pass NAME: FIGURES` or `FAIL NAME: …`.
set -u

old=$(realpath "$1") new=$(realpath "$2") interpreter=$(realpath "$3") dir=$4 suite=${SUITE:-bookworm}
shift 4
root=$dir/$suite run=$dir/run
machine=cube-package-$$
failures=0

pass() { echo "pass $1: ${2:-}"; }
fail() { echo "FAIL $1: ${2:-}"; failures=$((failures + 1)); }
# check NAME FIGURES COMMAND…
check() {
	local name=$1 figures=$2
	shift 2
	if "$@" >"$dir/check.log" 2>&1; then
		cp "$dir/check.log" "$dir/$name.log"
		pass "$name" "$figures"
	else
		fail "$name" "$* → $(tail -n 5 "$dir/check.log" | tr '\n' ' ')"
	fi
}
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f", b - a }'; }
# goal SECONDS LIMIT: a busy host may miss a goal although the package is fine, so the result is shown, not judged.
goal() { awk -v a="$1" -v b="$2" 'BEGIN { print "goal " b ": " (a <= b ? "met" : "MISSED") }'; }

# Runs a command in the machine.
inside() { nsenter -t "$init" -a -- env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"; }
# Sends a request to the server: METHOD PATH [BODY].
ask() {
	nsenter -t "$init" -n -- curl --silent --show-error --fail --max-time 60 --request "$1" \
		--header "X-API-Key: ${key:-none}" --header 'Content-Type: application/json' ${3:+--data "$3"} "http://127.0.0.1:3000$2"
}
field() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }
output() { inside env E2B_API_KEY="$key" cube run --template base -- /bin/echo hello from a sandbox; }

fresh_root() {
	[ -e "$root.done" ] && return
	rm -rf "$root"
	mmdebstrap --mode=root --variant=minbase --include=systemd,systemd-sysv,dbus,ca-certificates,procps,iproute2 \
		"$suite" "$root" >"$dir/mmdebstrap.log" 2>&1 || { tail -n 5 "$dir/mmdebstrap.log" >&2; exit 1; }
	touch "$root.done"
}

boot() {
	rm -rf "$run"
	cp -a "$root" "$run"
	mkdir "$run/packages"
	cp "$old" "$run/packages/old.deb"
	cp "$new" "$run/packages/new.deb"
	cp "$interpreter" "$run/packages/interpreter.deb"
	SYSTEMD_NSPAWN_API_VFS_WRITABLE=1 setsid systemd-nspawn --quiet --register=no --keep-unit --directory="$run" \
		--machine="$machine" --private-network --capability=all --system-call-filter="bpf perf_event_open" --bind=/dev/kvm --bind=/dev/net/tun --boot \
		</dev/null >"$dir/console.log" 2>&1 &
	nspawn=$!
	for _ in $(seq 100); do
		sleep 0.2
		init=$(pgrep -P "$nspawn" | head -n 1)
		[ -n "$init" ] && inside systemctl is-system-running 2>/dev/null | grep -qE 'running|degraded' && break
	done
	# As on a host: the machine's systemd finds these read-only or absent.
	inside sh -c 'for c in memory cpu pids blkio devices; do
			[ ! -d /sys/fs/cgroup/$c ] || mount -o remount,rw,bind /sys/fs/cgroup/$c; done
		mkdir -p /sys/fs/bpf && mount -t bpf bpf /sys/fs/bpf' || fail boot "the machine has no writable cgroups or no bpffs"
}

# Objects that an installation could leave behind: accounts, files, cgroups, eBPF pins, interfaces, processes.
traces() {
	inside sh -c 'getent passwd; getent group; ls -d /var/lib/cube* /etc/cube* /run/cube* /usr/lib/cube /usr/bin/cube* 2>/dev/null
		find /etc/systemd /lib/systemd /var/lib/systemd -name "*cube*"; find /sys/fs/bpf; ls /sys/class/net; ps -eo comm | grep "^cube"
		ls /etc /var/lib /tmp | grep -v -e "^ld.so.cache"; ls /var/lib/dpkg/info/cube.* 2>/dev/null' |
		grep -v -e systemd-private
	# The machine sees the cgroups of the host, including those of other servers. The cgroups of one server share a
	# prefix.
	inside find /sys/fs/cgroup -maxdepth 2 -name "${groups:-cube-none}*"
}

finish() {
	[ -n "${init:-}" ] && kill -s RTMIN+4 "$init" 2>/dev/null
	for _ in $(seq 50); do kill -0 "${nspawn:-0}" 2>/dev/null || break; sleep 0.2; done
	kill -9 "${nspawn:-0}" 2>/dev/null
	rm -rf "$run"
}

mkdir -p "$dir"
fresh_root
trap finish EXIT
boot
traces >"$dir/before"

# Install, and first output. The files are in the page cache, as after a download.
cat "$old" >/dev/null
began=$(now)
check install "" inside apt-get install --yes --no-install-recommends /packages/old.deb
installed=$(since "$began")
groups=$(inside sh -c 'cat /proc/$(systemctl show --property MainPID --value cube-api)/cgroup' |
	sed -n 's#.*/\(cube-[0-9a-f]*-[0-9a-f]*\)-server-.*#\1#p' | head -n 1)
key=$(inside cube-api key new test)
# The server re-reads its keys every half second.
first_output() { for _ in $(seq 20); do output && return; sleep 0.1; done; return 1; }
check first-output "" first_output
first=$(since "$began")
if grep -q "hello from a sandbox" "$dir/check.log"; then
	pass install-time "apt-get $installed s; to the first sandbox's output $first s ($(goal "$first" 60)), template included"
else
	fail install-time "no output of a sandbox after $first s"
fi
check service "" inside systemctl is-active cube-api.service cube-api.socket
exposure=$(inside systemd-analyze security --no-pager cube-api.service 2>/dev/null | tail -n 1)
pass exposure "${exposure#→ }"
inside journalctl -u cube-api --no-pager -o cat >"$dir/journal.log"
# Otherwise, the comparison at the end would have nothing to compare.
check cgroups "$groups" inside sh -c 'ls -d /sys/fs/cgroup/memory/"$1" 2>/dev/null || ls -d /sys/fs/cgroup/"$1"' sh "$groups"
check exports "$(grep -o 'export E2B_API_URL.*' "$dir/journal.log" | tail -n 1)" grep -q 'export E2B_API_URL=http://127.0.0.1:3000' "$dir/journal.log"
check doctor "" inside cube doctor

# A running sandbox, a paused one and a template, across an upgrade.
running=$(ask POST /sandboxes '{"templateID":"base","timeout":3600}' | field sandboxID)
paused=$(ask POST /sandboxes '{"templateID":"base","timeout":3600}' | field sandboxID)
ask POST "/sandboxes/$paused/pause" >/dev/null
snapshot=$(ask POST "/sandboxes/$running/snapshots" '{"name":"kept"}' | field snapshotID)
[ -n "$running" ] && [ -n "$paused" ] && [ -n "$snapshot" ] || fail sandboxes "running $running, paused $paused, snapshot $snapshot"
check restart "" inside systemctl restart cube-api.service
check running-after-restart "" ask GET "/sandboxes/$running"
# An options file of an earlier release remains in force across the upgrade.
inside sh -c 'echo "max-sandboxes = 200" >/etc/cube/server.conf'
server=$(inside systemctl show --property MainPID --value cube-api.service)
began=$(now)
check upgrade "" inside apt-get install --yes --no-install-recommends /packages/new.deb
pass upgrade-time "$(since "$began") s"
after=$(inside systemctl show --property MainPID --value cube-api.service)
check upgraded "process $server was replaced by $after" test "$server" != "$after"
check version "" inside sh -c 'dpkg-query -W -f "\${Version}" cube | grep -qx "$1" && [ "$(readlink /proc/$2/exe)" = /usr/lib/cube/bin/cube-api ]' sh \
	"$(dpkg-deb --field "$new" Version)" "$after"
check running-after-upgrade "" ask GET "/sandboxes/$running"
check paused-after-upgrade "" ask POST "/sandboxes/$paused/resume" '{}'
check template-after-upgrade "" ask POST /sandboxes "{\"templateID\":\"$snapshot\",\"timeout\":60}"
check output-after-upgrade "" output
check earlier-options "" inside sh -c 'cube server config check | grep "max_sandboxes = 200  # /etc/cube/server.conf:1"'
check earlier-options-warned "" inside sh -c 'journalctl -u cube-api -n 200 -o cat | grep "the options file /etc/cube/server.conf"'

# The package of the code interpreter, beside the running server.
cell() { # CODE RESULT
	local sandbox
	sandbox=$(ask POST /sandboxes '{"templateID":"code-interpreter-v1","timeout":60,"secure":false}' | field sandboxID)
	[ -n "$sandbox" ] && ask POST "/sandbox/$sandbox/49999/execute" "{\"code\":\"$1\"}" | grep -q "$2"
}
absent=$(nsenter -t "$init" -n -- curl --silent --request POST --header "X-API-Key: $key" --header 'Content-Type: application/json' \
	--data '{"templateID":"code-interpreter-v1"}' http://127.0.0.1:3000/v2/sandboxes)
check interpreter-absent "$absent" grep -q "install the package cube-code-interpreter" <<<"$absent"
began=$(now)
check interpreter-install "" inside apt-get install --yes --no-install-recommends /packages/interpreter.deb
check interpreter-cell "" cell 'print(6*7)' 42
pass interpreter-time "from apt-get to the first cell $(since "$began") s ($(goal "$(since "$began")" 60))"
check running-beside-interpreter "" ask GET "/sandboxes/$running"
check interpreter-remove "" inside apt-get remove --yes cube-code-interpreter
check interpreter-gone "" inside sh -c '! ls /var/lib/cube/installed/templates/code-interpreter-v1'

# Remove and install again: the template exists.
check remove "" inside apt-get remove --yes cube
check no-vm-after-remove "" inside sh -c '! ps -eo comm | grep "^cube"'
check state-after-remove "" inside test -d /var/lib/cube/installed/templates/base
began=$(now)
check reinstall "" inside apt-get install --yes --no-install-recommends /packages/new.deb
check output-again "" output
again=$(since "$began")
if grep -q "hello from a sandbox" "$dir/check.log"; then
	pass reinstall-time "to the first sandbox's output $again s ($(goal "$again" 10)), with the template"
else
	fail reinstall-time "no output of a sandbox after $again s"
fi

# A different state directory is refused with the remedy, and then used by all commands.
end='systemctl stop cube-api.service; cube-api end'
inside sh -c "$end" 2>/dev/null
inside sh -c 'mkdir -m 700 /srv/cube; sed -i "s|^#state = .*|state = \"/srv/cube\"|" /etc/cube/cube.toml; systemctl restart cube-api.service' 2>/dev/null
check state-refused "" inside sh -c 'journalctl -u cube-api -n 20 -o cat | grep "write .ReadWritePaths=/srv/cube"'
unit=/etc/systemd/system/cube-api.service.d
inside sh -c 'mkdir $1; printf "[Service]\nReadWritePaths=/srv/cube\n" >$1/state.conf; systemctl daemon-reload; systemctl reset-failed' sh $unit
check state-elsewhere "" inside systemctl restart cube-api.service
check state-reload "" inside systemctl reload cube-api.service
check state-key "" inside sh -c 'cube key new other && grep other /srv/cube/keys.json && cube quickstart'
inside sh -c "$end" 2>/dev/null
inside sh -c 'sed -i "s|^state = .*|#state = \"/var/lib/cube\"|" /etc/cube/cube.toml; systemctl restart cube-api.service; rm -r /srv/cube $1; systemctl daemon-reload' sh $unit

# A process that the removal did not end is reported by name.
inside sh -c 'cp /bin/sleep /tmp/cube-vmm && setsid /tmp/cube-vmm 1000 </dev/null >/dev/null 2>&1 & sleep 0.2; rm /tmp/cube-vmm'
began=$(now)
check purge "" inside apt-get purge --yes cube
pass purge-time "$(since "$began") s"
stray=$(inside sh -c 'grep -slx cube-vmm /proc/[0-9]*/comm | tr -dc "0-9\n"')
check purge-names-what-is-left "$stray" grep -q "kill -9 $stray" "$dir/purge.log"
inside kill -9 "$stray"
traces >"$dir/after"
if diff "$dir/before" "$dir/after" >"$dir/left"; then
	pass nothing-left
else
	fail nothing-left "$(tr '\n' ' ' <"$dir/left")"
fi

# The documents, in the same machine. apt is not called, because the machine has no network.
inside sh -c 'printf "APT::Get::Assume-Yes 1;\nAPT::Install-Recommends 0;\n" >/etc/apt/apt.conf.d/documents'
for session in "$@"; do
	cp -a "$session" "$run/session"
	inside sh -c 'cd /session && bash session.sh'
	rm -rf "$session/out"
	cp -a "$run/session/out" "$session/out"
	rm -rf "$run/session"
done
[ $failures -eq 0 ]
