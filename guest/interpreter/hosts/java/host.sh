#!/bin/sh
# Starts the host of Java contexts with the arguments "$@". Java cannot duplicate descriptors, so this shell moves the
# socket from standard input to descriptor 3.
#
# Only the C1 JIT compiler is used: the compiler of cells is itself Java code, and with C2 the first cells take twice as
# long. In exchange, loops that run for seconds are up to twice as slow.
here=$(dirname "$0")
exec java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:MaxRAMPercentage=60 \
    -XX:"${CUBE_ARCHIVE:-SharedArchiveFile}=$here/host.jsa" -Xshare:auto -Xlog:cds=error \
    -Dfile.encoding=UTF-8 -Dsun.stdout.encoding=UTF-8 -Dsun.stderr.encoding=UTF-8 \
    -jar "$here/host.jar" "$@" 3<&0 0</dev/null
