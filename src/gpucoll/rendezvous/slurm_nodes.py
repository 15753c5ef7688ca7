"""Slurm's compressed lists of node names: ``node[01-04,07],login``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

__all__ = ["node_names"]

_GROUP = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def node_names(text: str) -> Iterator[str]:
    """Yield the names in a node list, in its order.

    A name may have several brackets (the last one changes fastest) and text after them. Numbers
    keep their leading zeros. The names are made one by one, so taking the first names of a long
    list is cheap.

    Raises
    ------
    ValueError
        The text is not a node list; the error's text completes a sentence.
    """
    for group in list(_groups(text)):  # all of them, so that half a list gives no name
        yield from _expanded(group)


def _groups(text: str) -> Iterator[str]:
    """Yield the parts between the commas that are outside of brackets."""
    position = 0
    while True:
        group = _GROUP.match(text, position)
        if group is None:
            raise ValueError(f"no node name begins at character {position + 1}")
        yield group[0]
        position = group.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise ValueError(f"character {position + 1} is {text[position]!r}, not a comma")
        position += 1


def _expanded(group: str) -> Iterator[str]:
    """Yield the names that a name with brackets stands for."""
    before, bracket, rest = group.partition("[")
    if not bracket:
        yield group
        return
    ranges, _, after = rest.partition("]")
    for number in itertools.chain.from_iterable(map(_numbers, ranges.split(","))):
        for end in _expanded(after) if after else [""]:
            yield f"{before}{number}{end}"


def _numbers(text: str) -> Iterator[str]:
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no range of numbers")
    first, last = found[1], found[2] or found[1]
    if int(last) < int(first):
        raise ValueError(f"the range {text!r} ends before it begins")
    return (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
