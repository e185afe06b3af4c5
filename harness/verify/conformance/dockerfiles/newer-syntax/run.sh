#!/bin/sh
echo "$@" > /tmp/arguments
exec python3 -m http.server "$PORT"
