# Host of bash contexts: reads requests of zero-ended fields from its standard input, which is a socket, and
# answers there. The fields are described in the server's `message` module. Names begin with __cube_ so that
# they stay out of the way of the user's. Cells run with the socket closed, so that no child of theirs can
# hold it open.

exec 3<&0 0</dev/null

# An interrupt ends the cell's children, not this shell.
trap ':' INT

__cube_read() { IFS= read -r -d '' -u 3 "$1"; }

# Makes the sandbox's environment that of this shell; "$1" variables follow.
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

# Sets "$1" variables for one cell and notes what they were.
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
        # What `declare -p` says, made global: this is a function.
        [[ ${__cube_before[i]} ]] && eval "${__cube_before[i]/#declare /declare -g }"
    done
}

__cube_base=()
printf '{"ready":true}\n' >&3
while __cube_read __cube_seed; do
    # Another clone than before: $SRANDOM comes from the kernel, $RANDOM does not.
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
