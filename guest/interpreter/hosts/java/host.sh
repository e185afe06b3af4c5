#!/bin/sh
# Starts the host of Java contexts; "$@" is for the host. Java cannot move a descriptor: the shell takes the socket
# away from standard input.
#
# The simpler of the JIT compilers alone: cells are compiled by a compiler that is itself Java, and with the other one
# the first of them take twice the time. Loops that run for seconds are up to twice as slow for it.
here=$(dirname "$0")
exec java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:MaxRAMPercentage=60 \
    -XX:"${CUBE_ARCHIVE:-SharedArchiveFile}=$here/host.jsa" -Xshare:auto -Xlog:cds=error \
    -Dfile.encoding=UTF-8 -Dsun.stdout.encoding=UTF-8 -Dsun.stderr.encoding=UTF-8 \
    -jar "$here/host.jar" "$@" 3<&0 0</dev/null
