#!/bin/sh
# Turns a fresh Debian tree into the root image `base`. Run by mmdebstrap as a customize hook while the
# package lists are still there; $1 is the tree.
set -eu
tree=$1
recipe=$(dirname "$0")

# What was installed, with the sums that the archive signs. Moved out of the tree by the caller.
chroot "$tree" dpkg-query --show --showformat '${Package}=${Version}\n' |
    xargs chroot "$tree" apt-cache show > "$tree/.packages"

(cd "$recipe/files" && find . -type f -exec install -D -m 0644 {} "$tree/{}" \;)
chroot "$tree" useradd --uid 1000 --user-group --create-home --shell /bin/bash user
chmod 0440 "$tree/etc/sudoers.d/user"
chmod 0755 "$tree/home/user"
# Where older templates of E2B have users keep their code.
install -d -m 0777 "$tree/code"

# A sandbox is thrown away: its system's Python is there to be installed into, with pip as anywhere else.
rm -f "$tree"/usr/lib/python3.*/EXTERNALLY-MANAGED

# A clone takes its own id at start; an empty file is what systemd and D-Bus read as "none yet".
: > "$tree/etc/machine-id"
rm -f "$tree/var/lib/dbus/machine-id" "$tree/etc/ssh/ssh_host_"*
mkdir -p "$tree/proc" "$tree/sys" "$tree/dev" "$tree/run" "$tree/tmp" "$tree/mnt"

# The image fixes every file's time, so byte code that is checked by time would be stale and compiled
# anew by every import of every sandbox. Checked by nothing, it is always taken.
chroot "$tree" python3 -m compileall -q -f -j 0 --invalidation-mode unchecked-hash \
    -x '/(test|tests|idlelib|lib2to3/tests)/' /usr/lib/python3 /usr/lib/python3.*

rm -rf "$tree"/var/cache/debconf/* "$tree"/var/cache/ldconfig "$tree"/var/log/*.log "$tree"/var/log/apt
