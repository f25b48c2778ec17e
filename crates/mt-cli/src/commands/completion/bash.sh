# Completion of `maxtext` for bash.
_maxtext() {
    local IFS=$'\n'
    COMPREPLY=($("$1" complete bash "$COMP_CWORD" "${COMP_WORDS[@]:1}" 2>/dev/null))
    # A value follows a key, and a file a directory.
    case ${#COMPREPLY[@]}${COMPREPLY[0]-} in
        1*[=/]) compopt -o nospace 2>/dev/null ;;
    esac
}
complete -o default -F _maxtext maxtext
