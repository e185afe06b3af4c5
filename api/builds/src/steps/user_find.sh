# Finds the account $name: prints "found" and its name, or "missing" and what was asked for.
# Dockerfiles may name a group, which is that of the account here.
name="${name%%:*}"
while IFS=: read -r account _ number _ || [ -n "$account" ]; do
    if [ "$account" = "$name" ] || [ "$number" = "$name" ]; then
        printf 'found %s\n' "$account"
        exit 0
    fi
done </etc/passwd
printf 'missing %s\n' "$name"
