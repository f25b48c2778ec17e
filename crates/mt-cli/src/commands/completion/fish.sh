# Completion of `maxtext` for fish.
function __maxtext_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    $words[1] complete fish (count $words) $words[2..-1] "$current" 2>/dev/null
end
complete -c maxtext -f -a '(__maxtext_complete)'
