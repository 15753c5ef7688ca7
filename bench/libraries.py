"""Start the libraries to compare with: their ranks or their programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from gpucoll.bench.arguments import Options
from gpucoll.bench.checks import CannotMeasureError
from gpucoll.bench.groups import GroupError, ProcessGroup
from gpucoll.bench.measure_programs import START_S
from gpucoll.bench.peers import LocatedPeer
from gpucoll.bench.programs import Program, own_program, peer_program
from gpucoll.bench.rank.arrays import TEST_ARRAY
from gpucoll.bench.starts import own_group, peer_group

__all__ = ["ready_programs", "start_own", "start_peers"]


def start_peers(
    options: Options,
    located: list[LocatedPeer],
    ranks: int,
    cpus: list[int],
    stack: ExitStack,
    folder: Path,
) -> list[ProcessGroup]:
    """Start all peers at once, then wait for each; `stack` ends those that were started."""
    groups = []
    for one in located:
        group = peer_group(one, ranks, cpus, options.timeout_s, folder)
        stack.callback(group.close)
        groups.append(group)
    for one, group in zip(located, groups, strict=True):
        try:
            group.join(max(options.timeout_s, START_S))
        except GroupError as error:
            raise CannotMeasureError(
                f"{error}\n{one.name} ({one.python}) does not start"
            ) from error
        check_signature(one, group.versions)
    return groups


def start_own(
    options: Options, ranks: int, cpus: list[int], stack: ExitStack
) -> list[ProcessGroup]:
    """Start gpucoll's ranks, and with --one-cpu also ranks that are bound before they meet.

    For a test device, ranks with NumPy arrays are started, too: these are in the same memory.
    """
    places = {"gpucoll": (cpus, options.array, options.backend)}
    if options.one_cpu:
        bound = (cpus, options.array, options.backend)
        places = {"gpucoll": ([], *bound[1:]), "gpucoll-bound": bound}
    if options.array == TEST_ARRAY:
        places["gpucoll-numpy"] = (cpus, "numpy", "auto")
    groups = []
    for name, (cpus_of_group, array, backend) in places.items():
        group = own_group(ranks, cpus_of_group, options.timeout_s, array, name, backend)
        stack.callback(group.close)
        groups.append(group)
    for group in groups:
        group.join(max(options.timeout_s, START_S))
    if options.one_cpu:
        groups[0].call("bind", options.timeout_s, cpu=cpus[0])
    return groups


def ready_programs(
    options: Options,
    located: list[LocatedPeer],
    ranks: int,
    folder: Path,
    note: Callable[[str], None],
) -> list[Program]:
    """Return each library's program, run once to warm its files and learn its version."""
    programs = [own_program(ranks)]
    programs[0].run("startup", max(options.timeout_s, START_S))
    for one in located:
        if not one.mpiexec:
            note(
                f"{one.name} has no launcher of its own, so startup and memory are not measured "
                "for it"
            )
            continue
        programs.append(peer_program(one, ranks, folder))
        try:
            programs[-1].run("startup", max(options.timeout_s, START_S))
        except GroupError as error:
            raise CannotMeasureError(
                f"{error}\n{one.name} ({one.python}) does not start"
            ) from error
        check_signature(one, programs[-1].versions)
    return programs


def check_signature(one: LocatedPeer, versions: dict[str, str]) -> None:
    """Raise if another library runs in place of a peer."""
    if one.peer.signature not in versions["library"]:
        raise CannotMeasureError(
            f"{one.name}: {one.python} uses another MPI: {versions['library']}"
        )
