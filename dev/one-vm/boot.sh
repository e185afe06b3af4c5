#!/bin/sh
# boot.sh DIR: boots the image `base` in a VM with its sockets and console in DIR, then sends calls from standard input.
# The VM lives until the call "shutdown". Run it as root in a checkout, after `cargo xtask prepare`.
set -eu
here=$(dirname "$0") dir=$1 G=$PWD/target/cube/guest
hex() { head -c "$1" /dev/urandom | od -An -tx1 | tr -d ' \n'; }
mkdir "$dir"
python3 "$here/listen.py" "$dir/control" target/cube/bin/cube-vmm &
until [ -S "$dir/control" ]; do sleep 0.1; done
{
  echo '{"boot": {"memory": "256MiB", "vcpus": 1, "cmdline": "loglevel=8",
          "guest": {"kernel": "'"$G"'/vmlinux", "initrd": "'"$G"'/initramfs.cpio",
                    "root": "'"$G"'/base.erofs", "layer": "'"$G"'/layer.ext4"},
          "vsock": "'"$dir"'/vsock", "console": "'"$dir"'/console"}}
        @ kvm=/dev/kvm vsock='"$dir"'/vsock console='"$dir"'/console kernel='"$G"'/vmlinux initrd='"$G"'/initramfs.cpio
          root='"$G"'/base.erofs layer='"$G"'/layer.ext4 scratch=/var/tmp' | tr -d '\n'; echo
  echo '{"identity": {"identity": {"hostname": "a", "machine_id": "'"$(hex 16)"'", "entropy": "'"$(hex 32)"'"}, "within_ms": 20000}}'
  echo '"stats"'
  cat
} | python3 "$here/ctl.py" "$dir/control"
