"""``import horovod`` finds the front: until it has an alias of its own."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

_HERE = "gpucoll.integrations.horovod"
_ELSEWHERE = {
    "common": "",
    "common.basics": ".basics",
    "common.exceptions": ".exceptions",
    "common.process_sets": ".process_sets",
    "common.util": ".basics",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "horovod":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec) -> ModuleType:
        part = spec.name.removeprefix("horovod").removeprefix(".")
        where = _ELSEWHERE.get(part, f".{part}" if part else "")
        return importlib.import_module(_HERE + where)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    sys.meta_path.insert(0, _Finder())
