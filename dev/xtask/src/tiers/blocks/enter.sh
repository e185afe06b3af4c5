#!/bin/bash
# Runs a session in mount and PID namespaces of its own. It gets an own /var/lib/cube, an own bpffs, since the names of pins
# follow from that path, and a network with the loopback interface only.
set -eu
touch outside
mount --bind /proc/self/ns/net outside
mount -t tmpfs -o mode=0755 tmpfs /var/lib
mkdir -m 0700 /var/lib/cube
mount --bind state /var/lib/cube
mount -t bpf bpf /sys/fs/bpf
# The last command ends the sandboxes that the document leaves.
unshare --net bash -c 'ip link set lo up && bash session.sh; work/target/cube/bin/cube-api end'
