#!/bin/sh
# Compiles the host of Java contexts, beside this file, and makes an archive of the classes that first cells take:
# the JVM maps it where it would read and check them.
set -eu
here=$(dirname "$0")
classes=$(mktemp -d)
trap 'rm -r "$classes"' EXIT
javac -XDignore.symbol.file -Xlint:all,-serial -d "$classes" "$here"/*.java
jar cfm "$here/host.jar" "$here/manifest.txt" -C "$classes" .
rm -f "$here/host.jsa"
CUBE_ARCHIVE=ArchiveClassesAtExit sh "$here/host.sh" --train 0<>/dev/null >/dev/null
