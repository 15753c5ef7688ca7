"""Which tests a run of pytest takes: the quick tier, or longer ones named by ``--tier``.

``tests/README.md`` has the table of tiers. A test belongs to the quick tier unless

- its file or folder is in `PLACES`,
- it has the mark ``soak`` (``soak(quick=2)`` leaves two of its cases in the quick tier, which
  differ as much as possible; in a file of another tier the mark takes out what has it), or
- its parameters are a product: then the quick tier takes the cases that together have each value
  of each parameter once, and ``soak`` the rest.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("quick", "soak", "libraries", "frameworks", "mpi")
PLACES = {
    "tests/api/test_coming_from_libraries.py": "libraries",
    "tests/arrays/test_jax_arrays.py": "libraries",
    "tests/arrays/test_torch_compiler.py": "libraries",
    "tests/arrays/test_torch_tensors.py": "libraries",
    "tests/backends/mpi": "mpi",
    "tests/backends/nccl/test_cupy.py": "libraries",
    "tests/backends/nccl/test_rocm_bindings.py": "libraries",
    "tests/backends/oneccl/test_calls.py": "libraries",
    "tests/backends/oneccl/test_real.py": "libraries",
    "tests/bench/pictures/test_drawn.py": "libraries",
    "tests/bench/test_page_in_browser.py": "libraries",
    "tests/bench/test_with_mpis.py": "mpi",
    "tests/calls/gpu/test_between_namespaces.py": "soak",
    "tests/calls/gpu/test_direct_as_others.py": "soak",
    "tests/calls/gpu/test_direct_random_moments.py": "soak",
    "tests/calls/gpu/test_direct_ring.py": "soak",
    "tests/calls/gpu/test_grow.py": "soak",
    "tests/calls/gpu/test_jax.py": "libraries",
    "tests/calls/gpu/test_rings_between_hosts.py": "soak",
    "tests/calls/gpu/test_torch.py": "libraries",
    "tests/calls/gpu/test_torch_works.py": "libraries",
    "tests/calls/gpu/test_unasked.py": "soak",
    "tests/calls/gpu/test_works_after_the_end.py": "soak",
    "tests/entries/test_started_tensors.py": "libraries",
    "tests/entries/test_tensors.py": "libraries",
    "tests/faults/test_caught_errors.py": "soak",
    "tests/faults/test_started_calls.py": "soak",
    "tests/federated/test_libraries.py": "libraries",
    "tests/group/world/test_floods.py": "soak",
    "tests/group/world/test_lost_in_each_step.py": "soak",
    "tests/group/world/test_namespaces.py": "soak",
    "tests/integrations": "frameworks",
    "tests/integrations/flower/test_rounds.py": "soak",
    "tests/integrations/horovod/test_distribution.py": "quick",
    "tests/integrations/horovod/test_doors.py": "quick",
    "tests/integrations/horovod/test_elastic.py": "quick",
    "tests/integrations/horovod/test_engine.py": "quick",
    "tests/integrations/horovod/test_engine_failures.py": "quick",
    "tests/integrations/horovod/test_runner.py": "quick",
    "tests/integrations/horovod/test_settings.py": "quick",
    "tests/integrations/jax/processes/test_every_dtype.py": "soak",
    "tests/integrations/jax/processes/test_stub_library.py": "quick",
    "tests/integrations/jax/test_programs.py": "soak",
    "tests/integrations/keras/test_training.py": "soak",
    "tests/integrations/mpi4py": "quick",
    "tests/integrations/mpi4py/test_mpi4pys_own.py": "frameworks",
    "tests/integrations/mpi4py/test_programs_of_others.py": "frameworks",
    "tests/integrations/tensorflow/test_ops.py": "soak",
    "tests/integrations/test_native.py": "quick",
    "tests/kernels/cpu/test_memory_order.py": "soak",
    "tests/kernels/gpu/test_compile_amd.py": "soak",
    "tests/kernels/gpu/test_compile_cuda.py": "soak",
    "tests/kernels/gpu/test_on_gpu.py": "libraries",
    "tests/models": "soak",
    "tests/rendezvous/test_kubernetes.py": "frameworks",
    "tests/rendezvous/test_real_launchers.py": "mpi",
    "tests/rendezvous/test_slurm.py": "soak",
    "tests/tables/test_libraries.py": "libraries",
    "tests/tables/test_published_libraries.py": "libraries",
    "tests/tools/test_gpu_probes.py": "soak",
    "tests/test_typed.py": "libraries",
    "tests/tools/test_make_site.py": "libraries",
    "tests/training/gossip/test_libraries.py": "libraries",
    "tests/training/test_libraries.py": "libraries",
    "tests/transport/tcp/test_secure_streams.py": "soak",
}
"""The tier of each file or folder whose tests are not in the quick one; the longest path counts."""

IN_ONE_SHARE = (
    "tests/kernels/cpu/test_memory_order.py",
    "tests/kernels/gpu/test_compile_cuda.py",
    "tests/kernels/gpu/test_compile_amd.py",
)
"""Files in soak that first compile for minutes: each has all its cases in one share, its own."""

_LEFT = pytest.StashKey[Counter[str]]()


def add_options(parser: pytest.Parser) -> None:
    """Add ``--tier``."""
    text = "run the tests of this tier, not those of the quick one; may be given several times"
    parser.addoption(
        "--tier", action="append", choices=[*TIERS, "all"], default=[], metavar="TIER", help=text
    )
    text = "of the cases that a function has in soak, take one of N parts, the K-th"
    parser.addoption("--share", type=_share, default=(0, 1), metavar="K/N", help=text)


def _share(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    return part % parts, parts


def chosen_tiers(config: pytest.Config) -> set[str]:
    """Return the tiers that the command line asks for."""
    wanted = set(config.getoption("--tier")) or {"quick"}
    return {*TIERS} if "all" in wanted or config.option.markexpr else wanted


def leave_out_tiers(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other tiers, and count them; keep each test that is named itself."""
    wanted = chosen_tiers(config)
    named = [_path_and_test(argument) for argument in config.args if "::" in argument]
    tiers = list(tiers_of(items))
    shared = _other_shares(items, tiers, *config.getoption("--share"))
    kept: list[tuple[pytest.Item, str]] = []
    left: list[tuple[pytest.Item, str]] = []
    for item, tier in zip(items, tiers, strict=True):
        is_chosen = tier in wanted and item not in shared
        take = is_chosen or any(_is_named(item, *name) for name in named)
        (kept if take else left).append((item, tier))
    if left:
        config.hook.pytest_deselected(items=[item for item, _ in left])
    items[:] = [item for item, _ in kept]
    config.stash[_LEFT] = Counter(tier for _, tier in left)


def _other_shares(
    items: list[pytest.Item], tiers: list[str], part: int, parts: int
) -> set[pytest.Item]:
    """Return the cases of soak that are left to runs of the other shares."""
    others: set[pytest.Item] = set()
    soak = [item for item, tier in zip(items, tiers, strict=True) if tier == "soak"]
    for function, group in groupby(soak, key=_function_of):
        cases = list(group)
        # Functions with few cases begin in different shares, or the last would have none of them;
        # those of one file in the same one, so that what it prepares is not prepared in each.
        file = function.partition("::")[0]
        if file in IN_ONE_SHARE:
            others.update(cases if IN_ONE_SHARE.index(file) % parts != part else ())
            continue
        first = zlib.crc32(file.encode()) if len(cases) < parts else 0
        others.update(case for place, case in enumerate(cases) if (first + place) % parts != part)
    return others


def send_left(session: pytest.Session) -> None:
    """Tell xdist's controller, from one of its workers, what was left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = dict(_left(session.config))


def receive_left(config: pytest.Config, output: dict) -> None:
    """Note what a worker left out: every worker collects all tests, so one of them tells all."""
    config.stash[_LEFT] = Counter(output.get("left", {}))


def describe_left(config: pytest.Config) -> str:
    """Return the line of the summary that counts the tests of longer tiers, or an empty string."""
    left = _left(config)
    counts = ", ".join(f"{left[tier]:,} of {tier}" for tier in TIERS if left[tier])
    return counts and f"Left to other tiers: {counts} (pytest --tier all; tests/README.md)"


def _left(config: pytest.Config) -> Counter[str]:
    return config.stash.get(_LEFT, None) or Counter()


# --- which tier a test belongs to -----------------------------------------------------------------


def tiers_of(items: Sequence[pytest.Item]) -> Iterator[str]:
    """Yield the tier of each test, in order."""
    for _, group in groupby(items, key=_function_of):
        yield from _tiers_of_cases(list(group))


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _tiers_of_cases(cases: list[pytest.Item]) -> Iterator[str]:
    """Yield the tier of each case of one test function."""
    place = place_of(cases[0].nodeid.partition("::")[0])
    if place != "quick":
        yield from ("soak" if case.get_closest_marker("soak") else place for case in cases)
        return
    most = _n_quick(cases[0])
    quick = covering([_values_of(case, together=most is None) for case in cases])
    if most is not None and most < len(quick):
        quick = [quick[n * len(quick) // most] for n in range(most)]
    yield from ("quick" if position in quick else "soak" for position in range(len(cases)))


def place_of(file: str) -> str:
    """Return the tier of a file, where `PLACES` gives it one; else ``quick``."""
    parts = file.split("/")
    paths = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((PLACES[path] for path in paths if path in PLACES), "quick")


def _n_quick(case: pytest.Item) -> int | None:
    """Return how many cases of this case's function are quick at most; None: any number."""
    mark = case.get_closest_marker("soak")
    return None if mark is None else mark.kwargs.get("quick", 0)


def _values_of(case: pytest.Item, together: bool) -> dict[str, Hashable]:
    """Return the value of each parameter of a case.

    Parameters
    ----------
    case : pytest.Item
        One case of a test function.
    together : bool
        Make one value of the parameters that one mark gives together.
    """
    spec = getattr(case, "callspec", None)
    if spec is None:
        return {}
    values = {name: _identity(value) for name, value in spec.params.items()}
    for mark in case.iter_markers("parametrize") if together else ():
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        values[names] = tuple(values.pop(name.strip(), None) for name in names.split(","))
    return values


def _identity(value: object) -> Hashable:
    """Return what equals that of the same value in another case."""
    try:
        hash(value)
    except (TypeError, ValueError):  # ValueError: a memoryview
        return id(value)
    return type(value), value


def covering(cases: Sequence[dict[str, Hashable]]) -> list[int]:
    """Choose cases that together have each value of each parameter.

    Parameters
    ----------
    cases : sequence of dict
        The value of each parameter, by its name.

    Returns
    -------
    list of int
        Positions in `cases`, each next one with the most values that no earlier one has.
    """
    missing = {value for case in cases for value in case.items()}
    if not missing:
        return [0]
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda n: len(missing & cases[n].items()))
        chosen.append(best)
        missing -= cases[best].items()
    return chosen


# --- tests that the command line names ------------------------------------------------------------


def _path_and_test(argument: str) -> tuple[Path, str]:
    file, _, test = argument.partition("::")
    return Path(file).resolve(), test


def _is_named(item: pytest.Item, path: Path, test: str) -> bool:
    own = item.nodeid.partition("::")[2]
    return item.path == path and (own == test or own.startswith((f"{test}[", f"{test}::")))
