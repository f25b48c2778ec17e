#compdef maxtext
# Completion of `maxtext` for zsh.
_maxtext() {
    local -a answers
    answers=(${(f)"$("${words[1]}" complete zsh "$((CURRENT - 1))" "${(@)words[2,-1]}" 2>/dev/null)"})
    if (( ! ${#answers} )); then
        compset -P '*='
        _files
        return
    fi
    # A value follows a key, and a file a directory.
    compadd -S '' -- ${(M)answers:#*[=/]}
    compadd -- ${answers:#*[=/]}
}
compdef _maxtext maxtext
