#!/bin/sh
# Turns a fresh Debian tree into the root image `base`. mmdebstrap runs it as a customize hook, while the package lists
# still exist; $1 is the tree.
set -eu
tree=$1
recipe=$(dirname "$0")

# Records the installed packages with their checksums. The caller moves the file out of the tree.
chroot "$tree" dpkg-query --show --showformat '${Package}=${Version}\n' |
    xargs chroot "$tree" apt-cache show > "$tree/.packages"

(cd "$recipe/files" && find . -type f -exec install -D -m 0644 {} "$tree/{}" \;)
chroot "$tree" useradd --uid 1000 --user-group --create-home --shell /bin/bash user
chmod 0440 "$tree/etc/sudoers.d/user"
chmod 0755 "$tree/home/user"
# The directory for user code in older E2B templates.
install -d -m 0777 "$tree/code"

# Every command of E2B's SDKs runs in a login shell. Bash knows its user; a process for it costs milliseconds in a clone.
sed -i 's/"$(id -u)" -eq 0/"${EUID:-$(id -u)}" -eq 0/' "$tree/etc/profile"
grep -q EUID "$tree/etc/profile"

# /bin/bash is Debian's static build of the same version: without a dynamic linker it starts in half the time, which each
# command pays. It lacks only loadable builtins (`enable -f`); /bin/bash.dynamic has them.
chroot "$tree" dpkg-divert --quiet --local --rename --divert /bin/bash.dynamic /bin/bash
ln "$tree/bin/bash-static" "$tree/bin/bash"

# Avoids starting a process for it in each login shell of root, even without a terminal.
sed -i 's/^mesg n .*/[ ! -t 0 ] || &/' "$tree/root/.profile"
grep -q -- '-t 0' "$tree/root/.profile"

# pip may install into the system's Python: a sandbox is discarded after use.
rm -f "$tree"/usr/lib/python3.*/EXTERNALLY-MANAGED

# A clone gets its own ID at start; systemd and D-Bus take an empty file for "not initialized".
: > "$tree/etc/machine-id"
rm -f "$tree/var/lib/dbus/machine-id" "$tree/etc/ssh/ssh_host_"*
# Read by programs that call setmntent(3), for example.
ln -sf ../proc/self/mounts "$tree/etc/mtab"
mkdir -p "$tree/proc" "$tree/sys" "$tree/dev" "$tree/run" "$tree/tmp" "$tree/mnt"

# All files of the image have the same time stamp, so byte code that is validated by time would be considered stale and
# compiled at every import. Unchecked byte code is always used.
chroot "$tree" python3 -m compileall -q -f -j 0 --invalidation-mode unchecked-hash \
    -x '/(test|tests|idlelib|lib2to3/tests)/' /usr/lib/python3 /usr/lib/python3.*

rm -rf "$tree"/var/cache/debconf/* "$tree"/var/cache/ldconfig "$tree"/var/log/*.log "$tree"/var/log/apt
