#!/bin/sh
# Turns a tree of the packages of `base` and `code-interpreter` into that root image; $1 is the tree, $2 the
# directory of wheels.
set -eu
tree=$1
wheels=$2
recipe=$(dirname "$0")

# As official sandboxes have it: pip installs beside Debian's own packages.
cat > "$tree/etc/pip.conf" <<CONF
[global]
break-system-packages = true
disable-pip-version-check = true
root-user-action = ignore
CONF
ln -sf python3 "$tree/usr/bin/python"

mkdir "$tree/wheels"
cp "$wheels"/*.whl "$tree/wheels/"
# Already checked by sum when they were fetched; the recipe's own list names them again.
cp "$recipe/requirements.txt" "$tree/wheels/"
chroot "$tree" env PIP_CERT= PIP_FIND_LINKS= python3 -m pip install --quiet --no-index --no-deps --no-compile \
    --require-hashes --find-links /wheels -r /wheels/requirements.txt
rm -rf "$tree/wheels"

# Tests of packages are a third of their size and nobody's use.
site=$tree/usr/local/lib/python3.11/dist-packages
for package in numpy pandas scipy sklearn matplotlib sympy networkx; do
    find "$site/$package" -depth -type d -name tests -exec rm -rf {} +
done

# The image fixes every file's time: byte code that is checked by time would be stale at every import.
chroot "$tree" python3 -m compileall -q -f -j 0 --invalidation-mode unchecked-hash \
    /usr/local/lib/python3.11/dist-packages || true

# What fontconfig and matplotlib would make at the first plot of every sandbox.
chroot "$tree" env MPLCONFIGDIR=/usr/local/share/matplotlib python3 -c 'import matplotlib.font_manager'
rm -rf "$tree/root/.cache"
