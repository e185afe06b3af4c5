#!/bin/sh
# Turns a tree with the packages of `base` and `code-interpreter` into the root image `code-interpreter`; $1 is the
# tree, $2 the directory of wheels.
set -eu
tree=$1
wheels=$2
recipe=$(dirname "$0")

# As in official sandboxes, pip installs next to Debian's own packages.
cat > "$tree/etc/pip.conf" <<CONF
[global]
break-system-packages = true
disable-pip-version-check = true
root-user-action = ignore
CONF
ln -sf python3 "$tree/usr/bin/python"

mkdir "$tree/wheels"
cp "$wheels"/*.whl "$tree/wheels/"
# The checksums were verified at the download, and are verified again against the recipe's list.
cp "$recipe/requirements.txt" "$tree/wheels/"
chroot "$tree" env PIP_CERT= PIP_FIND_LINKS= python3 -m pip install --quiet --no-index --no-deps --no-compile \
    --require-hashes --find-links /wheels -r /wheels/requirements.txt
rm -rf "$tree/wheels"

# Tests of packages take a third of their size and are not needed.
site=$tree/usr/local/lib/python3.11/dist-packages
for package in numpy pandas scipy sklearn matplotlib sympy networkx; do
    find "$site/$package" -depth -type d -name tests -exec rm -rf {} +
done

# All files of the image have the same time stamp: byte code that is validated by time would be stale at every import.
chroot "$tree" python3 -m compileall -q -f -j 0 --invalidation-mode unchecked-hash \
    /usr/local/lib/python3.11/dist-packages || true

# Builds the caches that fontconfig and matplotlib would otherwise build at the first plot of every sandbox.
chroot "$tree" env MPLCONFIGDIR=/usr/local/share/matplotlib python3 -c 'import matplotlib.font_manager'
rm -rf "$tree/root/.cache"
