#!/bin/sh
# Compiles the host of Java contexts into this directory, and creates a CDS archive of the classes that first cells
# need: the JVM maps the archive instead of reading and verifying them.
set -eu
here=$(dirname "$0")
classes=$(mktemp -d)
trap 'rm -r "$classes"' EXIT
javac -XDignore.symbol.file -Xlint:all,-serial -d "$classes" "$here"/*.java
jar cfm "$here/host.jar" "$here/manifest.txt" -C "$classes" .
rm -f "$here/host.jsa"
CUBE_ARCHIVE=ArchiveClassesAtExit sh "$here/host.sh" --train 0<>/dev/null >/dev/null
