"""Runs mpi4py's own tests on this rank: ``FOLDER [FILE ...]``; the last line is a count."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cases(suite: Any) -> Iterator[unittest.TestCase]:
    """Yield every test of a suite."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from cases(item)
        else:
            yield item


def left_out() -> Any:
    """Return the module that says what is left out; this file runs without its package."""
    path = Path(__file__).with_name("left_out.py")
    spec = importlib.util.spec_from_file_location("left_out", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(folder: str, files: list[str]) -> int:
    from gpucoll.integrations.mpi4py.alias import install

    install()
    table = left_out()
    sys.path.insert(0, folder)
    sys.path.append(str(Path(folder).with_name("src")))  # mpi4py's modules of plain Python
    sys.modules["cupy"] = None  # type: ignore[assignment]  # they ask it for memory, with a GPU or not
    arrayimpl = importlib.import_module("arrayimpl")

    # GPU arrays are tested elsewhere; some of these are host memory that says it lies on a GPU,
    # of which the driver that gpucoll asks knows nothing.
    arrayimpl.ArrayBackends[:] = [
        kind for kind in arrayimpl.ArrayBackends if kind.__name__ in ("ArrayArray", "ArrayNumPy")
    ]
    warnings.simplefilter("ignore")
    loader = unittest.defaultTestLoader
    chosen = unittest.TestSuite()
    n_left_out = 0
    for case in cases(loader.loadTestsFromNames(files or list(table.FILES))):
        if any(name in case.id() for name in table.LEFT_OUT):
            n_left_out += 1
        else:
            chosen.addTest(case)
    result = unittest.TextTestRunner(verbosity=0).run(chosen)
    failed = {str(case).partition(" (")[0] for case, _ in (*result.failures, *result.errors)}
    sys.stderr.flush()
    print(
        f"ran {result.testsRun}, skipped {len(result.skipped)}, left out {n_left_out}, "
        f"failed {len(failed)}",
        flush=True,
    )
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
