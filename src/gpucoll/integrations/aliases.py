"""Programs written for another package, run unchanged: its name leads to a package of gpucoll."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["Alias", "run_program"]


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of a package under the name of another.

    Parameters
    ----------
    name : str
        The other package, such as ``mpi4py``.
    home : str
        The package that stands for it.
    elsewhere : mapping, optional
        Modules of the other package that have another place in `home`, both relative.
    """

    def __init__(self, name: str, home: str, elsewhere: Mapping[str, str] | None = None) -> None:
        self.name, self.home = name, home
        self.elsewhere = elsewhere or {}
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def install(self) -> None:
        """Make an import of the other package load this one, in this process from now on.

        Raises
        ------
        RuntimeError
            The other package is imported already.
        """
        loaded = sys.modules.get(self.name)
        if loaded is not None and getattr(loaded, "__name__", "") != self.home:
            raise RuntimeError(f"{self.name} is imported already: call this before importing it")
        if not any(isinstance(one, Alias) and one.name == self.name for one in sys.meta_path):
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the other package; None for modules of third ones."""
        if name != self.name and not name.startswith(f"{self.name}."):
            return None
        found = importlib.util.find_spec(self.place_of(name)) if self.serves(name) else None
        if found is None:  # no other finder may try
            return self.otherwise(name)
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def serves(self, name: str) -> bool:
        """Return whether a module of this name is looked for in `home`."""
        return True

    def place_of(self, name: str) -> str:
        """Return the full name here of a module of the other package."""
        if name == self.name:
            return self.home
        moved = self.elsewhere.get(name[len(self.name) + 1 :])
        if moved is not None:
            return f"{self.home}.{moved}" if moved else self.home
        above, _, last = name.rpartition(".")
        return f"{self.place_of(above)}.{last}"

    def otherwise(self, name: str) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that `home` does not have.

        Raises
        ------
        ModuleNotFoundError
            There is none either.
        """
        above = name.rpartition(".")[0]
        folders = getattr(sys.modules.get(self.place_of(above)), "__path__", [])
        there = {one.name for one in pkgutil.iter_modules(folders) if one.name[0] != "_"}
        renamed = (f"{self.name}.{old}".rpartition(".") for old in self.elsewhere)
        there.update(last for parent, _, last in renamed if parent == above)
        raise ModuleNotFoundError(
            f"No module named {name!r}: here {above} is {self.place_of(above)}, which has "
            f"{', '.join(sorted(there)) or 'no modules'}",
            name=name,
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of `home` that stands for it."""
        made = importlib.import_module(self.place_of(spec.name))
        self._specs[spec.name] = made.__spec__
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the spec of its own name again; it was executed under that name."""
        name = getattr(module.__spec__, "name", "")
        module.__spec__ = self._specs.pop(name, module.__spec__)

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of a module, for ``python -m``."""
        place = self.place_of(name)
        spec = importlib.util.find_spec(place)
        loader = spec.loader if spec else None
        return loader.get_code(place) if isinstance(loader, importlib.abc.InspectLoader) else None


def run_program(arguments: list[str], usage: str, prepare: Callable[[], None]) -> None:
    """Run ``-m MODULE``, ``-c CODE`` or a file, with the arguments that follow, as Python does.

    Parameters
    ----------
    usage : str
        The text for ``--help``, and for wrong arguments, which end the process.
    prepare : callable
        Called before the program begins.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        sys.exit(0 if arguments else 2)
    prepare()
    if arguments[0] in ("-m", "-c"):
        if len(arguments) < 2:
            print(usage, file=sys.stderr)
            sys.exit(2)
        kind, what, *rest = arguments
        sys.argv = [what if kind == "-m" else "-c", *rest]
        sys.path.insert(0, "")
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  # as python -c does
        return
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
