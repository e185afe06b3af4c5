#!/bin/bash
# Runs a session in its own mount and PID namespaces, with its own /var/lib/cube, its own bpffs (because the names
# of pins derive from that path), and a network with only the loopback interface.
set -eu
touch outside
mount --bind /proc/self/ns/net outside
mount -t tmpfs -o mode=0755 tmpfs /var/lib
mkdir -m 0700 /var/lib/cube
mount --bind state /var/lib/cube
mount -t bpf bpf /sys/fs/bpf
# The last command ends the sandboxes left by the document.
unshare --net bash -c 'ip link set lo up && bash session.sh; work/target/cube/bin/cube-api end'
