"""`skimp completion SHELL`: the script that teaches a shell skimp's verbs, options, files, runs and recipe keys."""

from __future__ import annotations

from typing import Annotated

import typer

#: Each asks skimp itself, which answers one offer a line, "word TAB explanation". A word that ends in `=`, `.` or `/`
#: is gone on from, so no space follows it. Bash cuts words at `=` and `:`, skimp does not: what bash believes to be
#: typed already is taken off again.
SCRIPTS = {
    "bash": r"""# skimp completion for bash:  source <(skimp completion bash)
_skimp_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" reply word typed="" IFS=$'\n'
    word="${line##*[[:space:]]}"
    [[ $COMP_WORDBREAKS == *=* && $word == *[=:]* ]] && typed="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    for reply in $(_SKIMP_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS="$line" "$1" 2>/dev/null); do
        reply="${reply%%$'\t'*}"
        COMPREPLY+=("${reply#"$typed"}")
    done
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}
complete -o default -F _skimp_complete skimp
""",
    "zsh": r"""#compdef skimp
# skimp completion for zsh:  source <(skimp completion zsh)  after compinit
_skimp() {
    local -a going ended
    local line value about
    for line in "${(@f)$(_SKIMP_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS="${(j: :)words[1,CURRENT]}" ${(Q)words[1]} 2>/dev/null)}"; do
        [[ -z $line ]] && continue
        value=${line%%$'\t'*} about=${${line#*$'\t'}//:/\\:}
        [[ $line == *$'\t'* ]] || about=""
        if [[ $value == *[=./] ]]; then going+=("${value//:/\\:}:$about"); else ended+=("${value//:/\\:}:$about"); fi
    done
    (( $#going )) && _describe -V skimp going -S ''
    (( $#ended )) && _describe -V skimp ended
    (( $#going + $#ended )) || _files
}
compdef _skimp skimp
""",
    "fish": r"""# skimp completion for fish:  skimp completion fish | source
complete --command skimp --no-files --arguments "(env _SKIMP_COMPLETE=complete_fish \
_TYPER_COMPLETE_FISH_ACTION=get-args _TYPER_COMPLETE_ARGS=(commandline -cp) skimp)"
""",
}


def shells() -> list[str]:
    return list(SCRIPTS)


def command(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", autocompletion=shells)],
) -> None:
    """Print the completion script of a shell."""
    from skimp.core.errors import SkimpError, did_you_mean

    if shell not in SCRIPTS:
        raise SkimpError(f"skimp completion {shell}", "no script for it", instead=did_you_mean(shell, SCRIPTS))
    print(SCRIPTS[shell], end="")
