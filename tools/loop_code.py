"""Write the machine code of all compiled loops as text, and compare two such files.

::

    python tools/loop_code.py write before.s        # in a checkout; two minutes
    python tools/loop_code.py compare before.s after.s

A change of the loops' source that is to change nothing must leave each loop's instructions as they
were. `compare` ignores names that Numba makes and the order of functions. It prints each loop that
is new, gone or other than before, and its exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import link_tree

_FUNCTION = re.compile(
    r"^\t\.type\t([\w.$]+),@function\n\1:(.*?)^\.Lfunc_end\d+:", re.MULTILINE | re.DOTALL
)
_CONSTANT = re.compile(r"^(\.LCPI\d+_\d+):\n((?:\t.*\n)+)", re.MULTILINE)
_DATA = re.compile(r"^([\w.$]+):\n((?:\t\.(?:quad|long|byte|asci[iz]|zero|short)\b.*\n)+)", re.M)
_NAME = re.compile(r"[\w.$]*[A-Za-z_][\w.$]*")


def write(path: Path) -> None:
    """Compile all loops of this checkout, optimise them together, and write them as assembly."""
    link_tree.make()
    sys.path.insert(0, str(link_tree.DEFAULT_PLACE))
    from gpucoll.backends import precompile
    from gpucoll.kernels.cpu import jit, linking

    modules = (*precompile.MODULES, *precompile.MODULES_WHEN_USED)
    for module in modules:
        importlib.import_module(module)
    loops = [loop for module in modules for loop in jit.loops_of(module)]
    whole, machine = linking.together(loops)
    path.write_text(machine.emit_assembly(whole), encoding="utf-8")
    print(f"{len(loops)} loops in {path}")


def functions(text: str) -> dict[str, str]:
    """Return the instructions of each function that is visible from outside, by name."""
    bodies = {name: _plain(body) for name, body in _FUNCTION.findall(text)}
    constants = dict(_CONSTANT.findall(text)) | dict(_DATA.findall(text))
    visible = set(re.findall(r"^\t\.globl\t([\w.$]+)", text, re.MULTILINE))
    return {name: _whole(name, bodies, constants) for name in sorted(visible & bodies.keys())}


def _plain(body: str) -> str:
    """Return a function without comments and directives, its labels without its number."""
    lines = (line.split("#")[0].rstrip() for line in body.splitlines())
    kept = [line for line in lines if line and not line.startswith("\t.")]
    return re.sub(r"\.L(BB|JTI)\d+_", r".L\1_", "\n".join(kept))


def _whole(name: str, bodies: dict[str, str], constants: dict[str, str]) -> str:
    """Return a function with all that it refers to, each in place of its name's first mention."""
    places = {name: "f0"}
    parts, wanted = [], [name]
    while wanted:
        here = wanted.pop(0)
        text = bodies.get(here) or constants.get(here, "")

        def named(found: re.Match[str]) -> str:
            word = found[0]
            if word not in bodies and word not in constants:
                return word
            if word not in places:
                places[word] = f"f{len(places)}"
                wanted.append(word)
            return places[word]

        parts.append(f"{places[here]}:\n{_NAME.sub(named, text)}")
    return "\n".join(parts)


def compare(before: Path, after: Path) -> Iterator[str]:
    """Yield a line for each function that is not the same in both files."""
    old, new = (functions(path.read_text(encoding="utf-8")) for path in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if name not in new or name not in old:
            yield f"{name}: only {'before' if name in old else 'after'}"
        elif old[name] != new[name]:
            counts = [len(text.splitlines()) for text in (old[name], new[name])]
            yield f"{name}: {counts[0]} lines before, {counts[1]} after"
    same = sum(old[name] == new.get(name) for name in old)
    print(f"{same} of {len(old)} functions are the same")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="The machine code of the compiled loops.")
    commands = parser.add_subparsers(dest="command", required=True)
    written = commands.add_parser("write", help="compile all loops and write them")
    written.add_argument("output", type=Path)
    compared = commands.add_parser("compare", help="print the loops that are not the same")
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "write":
        write(options.output)
        return 0
    differing = list(compare(options.before, options.after))
    print("\n".join(differing))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
