"""Run every probe, collect the answers, and draw conclusions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from gpucoll.doctor import libraries
from gpucoll.doctor.advice import NEEDED, advise
from gpucoll.doctor.choice import choices
from gpucoll.doctor.facts import (
    SCHEMA,
    DefaultGpuFound,
    Gpus,
    Memory,
    Package,
    Problem,
    Report,
    SelfTest,
)
from gpucoll.doctor.gpus import VENDORS
from gpucoll.doctor.host import system
from gpucoll.doctor.isolation import Answer, Question, ask
from gpucoll.doctor.network import gpu_direct
from gpucoll.topology.default_gpu import default_gpu
from gpucoll.version import __version__

__all__ = ["Limits", "examine", "report_of"]

FIRST = (
    "cpus", "memory", "kernels", "packages", "gpus", "libraries", "mpi", "nvlinks", "gpu_network"
)  # fmt: skip
"""Probes that need no results of others."""
SECTIONS = (
    "cpus", "memory", "kernels", "packages", "gpus", "libraries", "mpi", "topology", "gpu_network"
)  # fmt: skip
"""Probes whose answer is the report's section of the same name."""

COMPILE_S = 150.0
"""How much longer the self-test may take if the kernels must be compiled first, in seconds."""


class Limits(NamedTuple):
    """Deadlines, in seconds."""

    probe_s: float = 20.0
    self_test_s: float = 30.0


def examine(
    limits: Limits, with_self_test: bool, progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Examine this machine. Takes about two seconds, or until the deadline of the slowest probe.

    Parameters
    ----------
    limits : Limits
        Time limits of the probes and of the self-test.
    with_self_test : bool
        Whether to start two processes to test the CPU path.
    progress : callable
        Called with one line before steps that may take long.
    """
    questions = [Question(name, (), limits.probe_s) for name in FIRST]
    answers = dict(zip(FIRST, ask(questions), strict=True))
    # These build on earlier answers: the places of GPUs, and each copy of a library, which is
    # opened.
    copies = answers["libraries"].found or []
    questions = [Question("topology", (json.dumps(answers["nvlinks"].found),), limits.probe_s)]
    for copy in copies:
        questions.append(Question("library", (copy["name"], copy["path"]), limits.probe_s))
    answers["topology"], *looks = ask(questions)
    if answers["libraries"].found is not None:
        merged = libraries.merged(copies, [(look.found, look.problem) for look in looks])
        answers["libraries"] = Answer(merged, None)
    if with_self_test:
        answers["self_test"] = _tested(answers["kernels"], limits.self_test_s, progress)
    return report_of(answers)


def _tested(kernels: Answer, timeout_s: float, progress: Callable[[str], None]) -> Answer:
    if kernels.found is not None and not kernels.found["compiled"]:
        progress("compiling the CPU kernels once for this machine (10 s to a minute) ...")
        timeout_s += COMPILE_S
    # The ranks have the shorter deadline, so that their launcher can report which of them hang.
    question = Question("self_test", (f"{timeout_s:g}",), timeout_s + 10)
    (answer,) = ask([question])
    if answer.found is not None:
        return answer
    silent = {"passed": False, "elapsed_s": None, "single_copy": None, "problem": answer.problem}
    return Answer(silent, None)


def report_of(answers: dict[str, Answer]) -> Report:
    """Combine the answers and draw conclusions; pure except for the date and `system`."""
    found: dict[str, Any] = {name: answers[name].found for name in SECTIONS}
    test = answers["self_test"].found if "self_test" in answers else None
    works = _cpu_path_works(found["memory"], found["packages"] or (), test)
    gpus, topology = found["gpus"], found["topology"]
    report = Report(
        schema=SCHEMA,
        gpucoll=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu_path_works=works,
        system=system(),
        cpus=found["cpus"],
        memory=found["memory"],
        kernels=found["kernels"],
        packages=found["packages"],
        gpus=gpus,
        libraries=found["libraries"],
        mpi=found["mpi"],
        topology=topology,
        gpu_network=found["gpu_network"],
        gpu_direct_rdma=gpu_direct(topology, gpus["devices"] if gpus else []) if topology else [],
        self_test=test,
        auto=choices(works, gpus, found["libraries"]),
        default_gpus=_default_gpus(gpus),
        advice=[],
        problems=_problems(answers),
    )
    report["advice"] = advise(report)
    return report


def _cpu_path_works(
    memory: Memory | None, packages: Sequence[Package], test: SelfTest | None
) -> bool:
    """Return the self-test's verdict; without a self-test, whether nothing needed is missing."""
    if test is not None:
        return bool(test["passed"])
    has_memory = memory is not None and memory["shared_memory_problem"] is None
    installed = {package["name"] for package in packages if package["version"] is not None}
    return has_memory and installed.issuperset(NEEDED)


def _default_gpus(gpus: Gpus | None) -> list[DefaultGpuFound]:
    """Return the GPU of each local rank, for as many ranks as this process has GPUs.

    GPUs that the environment hides are not listed, because the driver omits them already.
    """
    vendor = VENDORS.get(gpus["kind"], "") if gpus is not None else ""
    mine = [device for device in gpus["devices"] if device["vendor"] == vendor] if gpus else []
    found = []
    for local_rank in range(len(mine)):
        gpu = default_gpu(local_rank, vendor, len(mine), {})
        assert gpu is not None
        found.append(
            DefaultGpuFound(
                local_rank=local_rank,
                vendor=vendor,
                number=gpu.number,
                pci_address=mine[gpu.number]["pci_address"],
            )
        )
    return found


def _problems(answers: dict[str, Answer]) -> list[Problem]:
    return [
        Problem(probe=name, problem=answer.problem)
        for name, answer in answers.items()
        if answer.problem is not None
    ]
