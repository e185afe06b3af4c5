#!/bin/bash
# Starts a cluster of three nodes on this machine, in the network namespaces a, b and c, with etcd in the namespace hub.
# Run it as root in a checkout, after `cargo xtask prepare`, with target/cube/bin and etcd in PATH. With the package, first
# run `cube-api prepare --state /srv/$x` for each node. Ctrl-C stops etcd and the servers.
set -eu
trap 'kill $(jobs -p)' EXIT
# Options for hosts that cannot enforce all limits.
S='--set network.mode=none --set sandbox.allow_missing_limits=true --set pool.warm=0:0'
ip netns add hub; ip -n hub link set lo up; ip -n hub link add br0 type bridge
ip -n hub addr add 10.77.0.254/24 dev br0; ip -n hub link set br0 up
n=1; for x in a b c; do
  mkdir -m 700 -p /srv/$x; ip netns add $x; ip -n $x link set lo up
  ip link add v$x netns hub type veth peer name up0 netns $x; ip -n hub link set v$x master br0 up
  ip -n $x addr add 10.77.0.$n/24 dev up0; ip -n $x link set up0 up; n=$((n+1))
done
ip netns exec a cube-api cluster init --node a --address 10.77.0.1:3001 --etcd https://10.77.0.254:2379 --state /srv/a
cd /srv/a/cluster; ip netns exec hub etcd --data-dir /srv/etcd --listen-peer-urls http://127.0.0.1:2380 \
  --auto-compaction-mode periodic --auto-compaction-retention 5m \
  --listen-client-urls https://10.77.0.254:2379 --advertise-client-urls https://10.77.0.254:2379 \
  --cert-file etcd.crt --key-file etcd.key --trusted-ca-file ca.crt --client-cert-auth &
key=$(cube-api key new ops --state /srv/a --scope sandboxes:read --scope sandboxes:write --scope nodes:admin)
ip netns exec a cube-api serve --cluster --listen 10.77.0.1:3000 --state /srv/a $S &
n=2; for x in b c; do
  until cube-api cluster token --state /srv/a | ip netns exec $x cube-api cluster join - \
    --node $x --address 10.77.0.$n:3001 --state /srv/$x; do sleep 1; done      # until etcd and the server of a answer
  ip netns exec $x cube-api serve --cluster --listen 10.77.0.$n:3000 --state /srv/$x $S & n=$((n+1))
done
echo "export E2B_API_KEY=$key"
wait
