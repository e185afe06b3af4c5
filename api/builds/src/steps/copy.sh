# Moves $1, a file, symbolic link or directory, to $target, which is relative to $2, or to the home of the user $3 if $2
# is empty. What is moved gets the owner $owner, and the mode $mode if that is not empty. A directory's content is merged
# into the target: existing directories keep owner, mode and links to them, everything else is replaced.
set -o pipefail

if [ -z "$2" ]; then
    home=/
    while IFS=: read -r account _ _ _ _ path _ || [ -n "$account" ]; do
        if [ "$account" = "$3" ]; then
            home="$path"
            break
        fi
    done </etc/passwd
fi
cd -- "${2:-$home}" || exit 1
case "$target" in
    /*) ;;
    *) target="$PWD/$target" ;;
esac

# Moves an entry to a path, whose parent exists. A directory there is merged with a directory, and otherwise kept if it
# has entries.
place() {
    local name
    if [ -d "$1" ] && [ ! -L "$1" ]; then
        if [ -d "$2" ]; then
            for name in "$1"/* "$1"/.[!.]* "$1"/..?*; do
                if [ -e "$name" ] || [ -L "$name" ]; then
                    place "$name" "$2/${name##*/}" || return 1
                fi
            done
            return 0
        fi
        if [ -e "$2" ] || [ -L "$2" ]; then
            rm -f -- "$2" || return 1
        fi
    elif [ -d "$2" ] && [ ! -L "$2" ]; then
        rmdir -- "$2" || return 1
    fi
    mv -fT -- "$1" "$2"
}

if [ -L "$1" ]; then
    chown -h -- "$owner" "$1" || exit 1
elif [ -f "$1" ]; then
    chown -- "$owner" "$1" || exit 1
    if [ -n "$mode" ]; then
        chmod -- "$mode" "$1" || exit 1
    fi
elif [ -d "$1" ]; then
    chown -hR -- "$owner" "$1" || exit 1
    if [ -n "$mode" ]; then
        chmod -R -- "$mode" "$1" || exit 1
    fi
    mkdir -p -- "$target" && place "$1" "$target"
    exit
else
    echo "Error: source path does not exist: ${1#/tmp/*/unpack/}" >&2
    exit 1
fi

case "$target" in
    */) mkdir -p -- "$target" || exit 1 ;;
    *) mkdir -p -- "$(dirname -- "$target")" || exit 1 ;;
esac
if [ -d "$target" ]; then
    target="${target%/}/${1##*/}"
fi
place "$1" "$target"
