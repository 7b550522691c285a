"""The command ``halfstep completion``: shell completion of commands, options and their values."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.cli.commands import COMMANDS, Completion
from halfstep.cli.grammar import choices_of, keys_of, leaves, parser_of
from halfstep.words import spoken

_BASH = """_halfstep() {
  local words="$(halfstep completion words -- "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null)"
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _halfstep halfstep"""
_FISH = "complete -c halfstep -a '(halfstep completion words -- (commandline -opc)[2..])'"
SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}",
    "fish": _FISH,
}


def run(arguments: Completion) -> int:
    """Print a shell's script, or the possible next words, which the script asks for at each Tab."""
    shell = arguments.shell
    print(SCRIPTS[shell] if shell != "words" else "\n".join(following(arguments.words)))
    return 0


def following(words: Sequence[str]) -> list[str]:
    """List the words that may follow the given words of a command line."""
    name = next((name for n in (2, 1) if (name := " ".join(words[:n])) in COMMANDS), "")
    if not name:
        rest = [n.split()[len(words) :] for n in COMMANDS if n.split()[: len(words)] == list(words)]
        return list(dict.fromkeys(parts[0] for parts in rest if parts))
    options = parser_of(name, spoken())._option_string_actions
    key = options[words[-1]].dest if words[-1] in options else ""
    kind = COMMANDS[name]
    for option in [*keys_of(kind), *leaves(kind)]:
        if option.key == key and choices_of(option.hint):
            return choices_of(option.hint)
    return sorted(options)
