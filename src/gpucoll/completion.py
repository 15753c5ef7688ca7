"""``gpucoll completion SHELL``: the completion of gpucoll's commands, made from their parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gpucoll.command_line import OneLineParser

__all__ = ["main", "make_parser"]

SHELLS = ("bash", "zsh", "fish")
EPILOG = """\
bash:  eval "$(gpucoll completion bash)"            in ~/.bashrc
zsh:   eval "$(gpucoll completion zsh)"             in ~/.zshrc, after compinit
fish:  gpucoll completion fish | source             in ~/.config/fish/config.fish
"""


class Option(NamedTuple):
    """An option of a command."""

    names: tuple[str, ...]
    text: str
    takes_value: bool
    choices: tuple[str, ...]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = OneLineParser(
        prog="gpucoll completion",
        description="Print the completion of gpucoll's commands for a shell.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    print(_WRITERS[make_parser().parse_args(arguments).shell](), end="")
    return 0


def options_of(parser: argparse.ArgumentParser) -> Iterator[Option]:
    """Yield the options of a command, without those that are not shown."""
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or not (action.option_strings or action.choices):
            continue
        text = (action.help or "") % {"default": action.default, "prog": parser.prog}
        choices = tuple(map(str, action.choices or ()))
        yield Option(tuple(action.option_strings), text, action.nargs != 0, choices)


def _commands() -> dict[str, tuple[str, list[Option], bool]]:
    """Return each command's description, its options, and whether it is a program as well."""
    from gpucoll.__main__ import COMMANDS

    found = {
        name: (each.description, [*options_of(each.make_parser())], each.has_program)
        for name, each in COMMANDS.items()
    }
    for name in _inner():
        outer, _, word = name.partition(" ")
        found[outer][1].append(Option((), found[name][0], False, (word,)))
    return found


def _inner() -> list[str]:
    """Return the names of the commands of commands: ``bench report``."""
    from gpucoll.__main__ import COMMANDS

    return [name for name in COMMANDS if " " in name]


def _outer() -> list[str]:
    """Return the names of the other commands."""
    return [name for name in _commands() if name not in _inner()]


# --- bash -----------------------------------------------------------------------------------------


def _bash() -> str:
    lines = [
        "_gpucoll() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} next=1",
    ]
    lines += ["    local command=${COMP_WORDS[0]##*/} options=", "    COMPREPLY=()"]
    lines += ["    if [ $command = gpucoll ]; then"]
    lines += ["        if [ $COMP_CWORD -eq 1 ]; then"]
    lines += [f'            COMPREPLY=($(compgen -W "{" ".join(_outer())}" -- "$word"))']
    lines += [
        "            return",
        "        fi",
        "        command=gpucoll-${COMP_WORDS[1]} next=2",
        "    fi",
        "    if [ $COMP_CWORD -gt $next ]; then",
        '        case "$command ${COMP_WORDS[next]}" in',
        f"            {_patterns()}) command=$command-${{COMP_WORDS[next]}} ;;",
        "        esac",
        "    fi",
    ]
    lines += ['    case "$command $before" in']
    for name, (_, options, _) in _commands().items():
        for option in options:
            patterns = "|".join(f'"{_key(name)} {each}"' for each in option.names)
            if option.choices and patterns:
                words = " ".join(option.choices)
                lines.append(
                    f'        {patterns}) COMPREPLY=($(compgen -W "{words}" -- "$word")); return ;;'
                )
            elif option.takes_value and patterns:
                lines.append(f"        {patterns}) return ;;")
    lines += ["    esac", '    case "$command $word" in']
    for name, (_, options, _) in _commands().items():
        for pattern, words_of in _bash_words(options):
            if words_of:
                offered = f'COMPREPLY=($(compgen -W "{" ".join(words_of)}" -- "$word"))'
                lines.append(f"        {_key(name)}\\ {pattern}) {offered} ;;")
    lines += ["    esac", "}", f"complete -o default -F _gpucoll {' '.join(_programs())}", ""]
    return "\n".join(lines)


def _key(name: str) -> str:
    """Return what the completion calls a command."""
    return f"gpucoll-{name.replace(' ', '-')}"


def _patterns() -> str:
    """Return what a shell's case matches with a command and the word after it."""
    return "|".join(f'"gpucoll-{name}"' for name in _inner())


def _bash_words(options: list[Option]) -> Iterator[tuple[str, list[str]]]:
    """Yield what is offered for a word that begins with a dash, and for any other."""
    yield "-*", [name for option in options for name in option.names]
    yield "*", [word for option in options if not option.names for word in option.choices]


# --- zsh ------------------------------------------------------------------------------------------


def _zsh() -> str:
    lines = [f"#compdef {' '.join(_programs())}", "_gpucoll() {", "    local command=$service"]
    lines += ["    if [[ $command == gpucoll ]]; then", "        if (( CURRENT == 2 )); then"]
    rows = [f"{name}:{_commands()[name][0]}" for name in _outer()]
    lines += [f"            local -a commands=({' '.join(map(shlex.quote, rows))})"]
    lines += ["            _describe command commands", "            return", "        fi"]
    lines += ["        command=gpucoll-$words[2]", "        shift words; (( CURRENT-- ))", "    fi"]
    lines += ["    if (( CURRENT > 2 )); then", '        case "$command $words[2]" in']
    moved = "shift words; (( CURRENT-- ))"
    lines += [f"            {_patterns()}) command=$command-$words[2]; {moved} ;;"]
    lines += ["        esac", "    fi", "    case $command in"]
    for name, (_, options, _) in _commands().items():
        specs = [spec for option in options for spec in _zsh_specs(option)]
        specs += [] if name == "completion" else ["*:file:_files"]
        lines.append(f"        {_key(name)}) _arguments {' '.join(map(shlex.quote, specs))} ;;")
    lines += ["    esac", "}", f"compdef _gpucoll {' '.join(_programs())}", ""]
    return "\n".join(lines)


def _zsh_specs(option: Option) -> Iterator[str]:
    text = option.text.translate({ord(each): f"\\{each}" for each in "[]:"})
    values = f"({' '.join(option.choices)})" if option.choices else " "
    for name in option.names:
        yield f"{name}[{text}]" + (f":value:{values}" if option.takes_value else "")
    if not option.names:
        yield f"1:value:{values}"


# --- fish -----------------------------------------------------------------------------------------


def _fish() -> str:
    lines = []
    for name, (text, options, has_program) in _commands().items():
        first, *rest = name.split()
        seen = [f"__fish_seen_subcommand_from {word}" for word in (first, *rest)]
        if not rest:
            lines.append(
                f"complete -c gpucoll -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}"
            )
        for option in options:
            words = _fish_words(option)
            lines.append(f"complete -c gpucoll -n '{'; and '.join(seen)}' {words}")
            if has_program:
                lines.append(f"complete -c gpucoll-{name} {words}")
            elif rest:
                lines.append(f"complete -c gpucoll-{first} -n '{seen[1]}' {words}")
    return "\n".join([*lines, ""])


def _fish_words(option: Option) -> str:
    words = []
    for name in option.names:
        kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
        words.append(f"{kind} {name.lstrip('-')}")
    if option.choices:
        words.append(f"{'-x' if option.names else '-f'} -a {shlex.quote(' '.join(option.choices))}")
    elif option.takes_value:
        words.append("-r")
    return " ".join([*words, "-d", shlex.quote(option.text)])


def _programs() -> list[str]:
    """Return the programs that the completion is for."""
    return [
        "gpucoll",
        *(f"gpucoll-{name}" for name, (_, _, is_one) in _commands().items() if is_one),
    ]


_WRITERS: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
