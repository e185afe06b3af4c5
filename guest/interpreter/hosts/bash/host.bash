# Host of bash contexts: reads requests of zero-terminated fields from its standard input, a socket, and responds there.
# The server's `message` module describes the fields. Names begin with __cube_ to avoid conflicts with those of users.
# Cells run with the socket closed, so that their children cannot hold it open.

exec 3<&0 0</dev/null

# SIGINT ends the cell's children, not this shell.
trap ':' INT

__cube_read() { IFS= read -r -d '' -u 3 "$1"; }

# Replaces the sandbox's environment in this shell; "$1" variables follow.
__cube_set_base() {
    local pair name i
    for name in "${__cube_base[@]}"; do unset "$name"; done
    __cube_base=()
    for ((i = 0; i < $1; i++)); do
        __cube_read pair
        __cube_base+=("${pair%%=*}")
        export "${pair?}"
    done
}

# Sets "$1" variables for one cell and records their previous values.
__cube_set_cell() {
    local pair name i
    __cube_names=() __cube_before=()
    for ((i = 0; i < $1; i++)); do
        __cube_read pair
        name=${pair%%=*}
        __cube_names+=("$name")
        __cube_before+=("$(declare -p "$name" 2>/dev/null)")
        export "${pair?}"
    done
}

__cube_restore() {
    local i
    for i in "${!__cube_names[@]}"; do
        unset "${__cube_names[i]}"
        # Evaluates the output of `declare -p` with -g, because this is a function.
        [[ ${__cube_before[i]} ]] && eval "${__cube_before[i]/#declare /declare -g }"
    done
}

__cube_base=()
printf '{"ready":true}\n' >&3
while __cube_read __cube_seed; do
    # Reseeds in a new clone: $SRANDOM comes from the kernel, $RANDOM does not.
    [[ $__cube_seed ]] && RANDOM=$SRANDOM
    __cube_read __cube_count && [[ $__cube_count ]] && __cube_set_base "$__cube_count"
    __cube_read __cube_count && __cube_set_cell "$__cube_count"
    __cube_read __cube_code
    eval "$__cube_code" 3<&-
    __cube_status=$?
    __cube_restore
    ((__cube_status)) &&
        printf '{"type":"error","name":"","value":"%d","traceback":""}\n' "$__cube_status" >&3
    printf '{"done":true}\n' >&3
done
