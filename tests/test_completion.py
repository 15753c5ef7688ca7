"""The completion of shells: what bash offers, and the texts for zsh and fish."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gpucoll import completion
from gpucoll.__main__ import COMMANDS

RUN = """\
source /dev/stdin
COMP_WORDS=({words}) COMP_CWORD={last}
_gpucoll
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(capsys, *words):
    """Return what bash offers for the last word."""
    assert completion.main(["bash"]) == 0
    script = RUN.format(words=" ".join(f"'{word}'" for word in words), last=len(words) - 1)
    ended = subprocess.run(
        ["bash", "-c", script],
        input=capsys.readouterr().out,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["gpucoll", ""], [name for name in COMMANDS if " " not in name]),
        (["gpucoll", "bench", "re"], ["report"]),
        (["gpucoll-bench", "compare", "--thr"], ["--threshold"]),
        (["gpucoll", "bench", "compare", "--thr"], ["--threshold"]),
        (["gpucoll", "do"], ["doctor"]),
        (["gpucoll", "run", "--bi"], ["--bind"]),
        (["gpucoll-run", "--bi"], ["--bind"]),
        (["gpucoll", "run", "--bind", ""], ["auto", "none"]),
        (["gpucoll", "run", "scr"], []),
        (["gpucoll", "run", "--timeout", ""], []),
        (["gpucoll", "completion", ""], ["bash", "zsh", "fish"]),
        (["/usr/bin/gpucoll-doctor", "--js"], ["--json"]),
    ],
)
def test_bash_offers(capsys, words, offered):
    assert completed(capsys, *words) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_each_option_is_there(capsys, shell):
    completion.main([shell])
    text = capsys.readouterr().out
    for command in COMMANDS.values():
        for option in completion.options_of(command.make_parser()):
            assert all(name.lstrip("-") in text for name in option.names)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_takes_it(capsys, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    completion.main([shell])
    text = capsys.readouterr().out
    ended = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_bad_shell(capsys):
    with pytest.raises(SystemExit) as ended:
        completion.main(["tcsh"])
    assert ended.value.code == 2
    assert "gpucoll completion: argument shell: invalid choice: 'tcsh'" in capsys.readouterr().err
