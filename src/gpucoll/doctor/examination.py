"""Ask every probe, put the answers together, and draw the conclusions."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, NamedTuple

from gpucoll.doctor import libraries
from gpucoll.doctor.advice import NEEDED, advise
from gpucoll.doctor.choice import choices
from gpucoll.doctor.facts import SCHEMA, DefaultGpuFound, Gpus, Problem, Report
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
"""Probes that need nothing of others."""
SECTIONS = (
    "cpus", "memory", "kernels", "packages", "gpus", "libraries", "mpi", "topology", "gpu_network"
)  # fmt: skip
"""Probes whose answer is the section of the same name."""

COMPILE_S = 150.0
"""What the self-test may take longer where the kernels must be compiled first."""


class Limits(NamedTuple):
    """Deadlines, in seconds."""

    probe_s: float = 20.0
    self_test_s: float = 30.0


def examine(
    limits: Limits, with_self_test: bool, progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Look at this machine. Takes about two seconds, or until the deadline of the slowest probe.

    Parameters
    ----------
    limits : Limits
        How long each probe and the self-test may take.
    with_self_test : bool
        Whether two processes are started to see that the CPU path works.
    progress : callable
        Gets one line before what may take long.
    """
    questions = [Question(name, (), limits.probe_s) for name in FIRST]
    answers = dict(zip(FIRST, ask(questions), strict=True))
    # What builds on these: where GPUs sit, and each copy of a library, opened.
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
    # The ranks are ended first, so that their launcher can tell.
    question = Question("self_test", (f"{timeout_s:g}",), timeout_s + 10)
    (answer,) = ask([question])
    if answer.found is not None:
        return answer
    silent = {"passed": False, "elapsed_s": None, "single_copy": None, "problem": answer.problem}
    return Answer(silent, None)


def report_of(answers: dict[str, Answer]) -> Report:
    """Put answers together and conclude from them; pure but for the date and `system`."""
    found: dict[str, Any] = {name: answers[name].found for name in SECTIONS}
    test = answers["self_test"].found if "self_test" in answers else None
    works = _cpu_path_works(found, test)
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


def _cpu_path_works(found: dict[str, Any], test: dict[str, Any] | None) -> bool:
    """Say whether it works: the self-test knows; without it, nothing that it needs is missing."""
    if test is not None:
        return bool(test["passed"])
    memory, packages = found["memory"], found["packages"] or ()
    has_memory = memory is not None and memory["shared_memory_problem"] is None
    installed = {package["name"] for package in packages if package["version"] is not None}
    return has_memory and installed.issuperset(NEEDED)


def _default_gpus(gpus: Gpus | None) -> list[DefaultGpuFound]:
    """Return the GPU of each local rank, for as many ranks as a communicator has GPUs to take.

    The driver has hidden what the environment hides already.
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
