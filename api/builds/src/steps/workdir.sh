# Makes the directory $target, relative to $1, for the user $2. Prints "made" or "found", and the directory.
case "$target" in
    /*) ;;
    *) target="$1/$target" ;;
esac
result=found
if [ ! -d "$target" ]; then
    result=made
    # Only what is made here changes its owner.
    missing="$target"
    while [ ! -d "$missing" ]; do
        first="$missing"
        missing="$(dirname -- "$missing")"
    done
    mkdir -p -- "$target" || exit
    chown -R "$2:$2" "$first" || exit
fi
cd -- "$target" || exit
printf '%s\n%s\n' "$result" "$PWD"
