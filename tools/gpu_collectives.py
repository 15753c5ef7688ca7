"""Check every call of gpucoll against the oracle, with any number of ranks that share GPU 0.

::

    gpucoll-run -n 4 tools/gpu_collectives.py --backend direct --output direct_4.json

tools/gpu_check.py runs this. A call that fails is a row, and all ranks continue with a new
communicator, so that a failure neither affects nor hides others. ``--staged`` stages everything
through host memory, although ranks could read each other's GPU memory. ``--ring`` takes reductions
around a ring, and ``--hosts`` lets the ranks play hosts of their own, between which rings go; both
with small arrays, too. With ``--mixed`` rank 0 has
the GPU, and all other ranks use the CPU and pass NumPy arrays in the same calls. Its tests run it
without a GPU: with ``--array numpy`` on the CPU backend, with ``--array host-device`` on Host
devices.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gpucoll
from gpucoll import config
from gpucoll.backends.direct import between, peer, peer_memory
from gpucoll.errors import ArgumentTypeError, BackendUnavailableError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests' oracle and cases
sys.path.insert(0, str(ROOT / "tools"))

from gpu_composed_calls import composed_checks, expect, left_out  # noqa: E402
from gpu_rows import Step, run_on_ranks  # noqa: E402
from tests.calls.gpu.cases import GpuCase  # noqa: E402
from tests.calls.gpu.kits import HostDeviceKit, RealCupyKit  # noqa: E402
from tests.collective_cases import COLLECTIVES, REDUCTIONS, ROOTED, Case, run_case  # noqa: E402

CALL_S = 20.0
"""Deadline of a call, which limits the time that a hanging rank costs."""
MEETING_S = 60.0
DTYPES = ("float32", "int32", "bfloat16", "float16", "bool", "int16")
COUNTS = (0, 1, 1000, 100_003)
TIMED_BYTES = (4096, 1 << 20, 64 << 20)
Check = Callable[[Any, Any], dict[str, Any] | None]
"""A check of a communicator with arrays; raises AssertionError if a result is wrong."""


class HostKit:
    """NumPy's arrays, in place of GPU arrays."""

    kit: Any = None
    """The kit that tests of GPU arrays use."""
    device: int | None = None

    def array(self, values: Any) -> Any:
        """Return an array of these values."""
        return np.array(values)

    def read(self, x: Any) -> Any:
        """Return an array's values."""
        return x

    def wait(self) -> None:
        """Do nothing: a call returns when it is done."""

    def run(self, comm: Any, case: Case) -> dict[str, Any] | None:
        """Run a case and compare it with the oracle."""
        run_case(comm, case)
        return None


class GpuKit(HostKit):
    """CuPy's arrays on GPU 0."""

    device = 0

    def __init__(self) -> None:
        self.cupy: Any = importlib.import_module("cupy")
        self.cupy.cuda.Device(0).use()
        self.kit = RealCupyKit(self.cupy)

    def array(self, values: Any) -> Any:
        """Return an array on the GPU."""
        return self.cupy.asarray(np.asarray(values))

    def read(self, x: Any) -> Any:
        """Return an array's values."""
        return x.get()

    def wait(self) -> None:
        """Wait for the whole GPU."""
        self.cupy.cuda.runtime.deviceSynchronize()

    def run(self, comm: Any, case: Case) -> dict[str, Any] | None:
        """Run a case and compare it with the oracle."""
        if not self.kit.knows(case.dtype):
            return left_out(f"{self.kit.name} has no {case.dtype}")
        made = GpuCase(comm, self.kit, case)
        made.check(made.run())
        return None


class TestDeviceKit(GpuKit):
    """Arrays on a Host device, which all ranks share as they would share a GPU."""

    def __init__(self) -> None:
        os.environ.update({config.DEVICE: "host", config.CPU_ONLY: "0"})
        self.arrays: Any = importlib.import_module("gpucoll.testing.device_arrays")
        self.arrays.use(0)
        self.kit = HostDeviceKit(self.arrays)

    def array(self, values: Any) -> Any:
        """Return an array on the device."""
        return self.arrays.asarray(np.asarray(values))

    def wait(self) -> None:
        """Wait for the whole device."""
        self.arrays.synchronize()


KITS: dict[str, Callable[[], HostKit]] = {
    "cupy": GpuKit,
    "host-device": TestDeviceKit,
    "numpy": HostKit,
}


def checks(world_size: int) -> Iterator[tuple[str, Check]]:
    """Yield all checks by name, in the same order on every rank."""
    for name in COLLECTIVES:
        for place, dtype in enumerate(DTYPES):
            op = ("max" if dtype == "bool" else "sum") if name in REDUCTIONS else ""
            for count in COUNTS:
                root = (count + place) % world_size if name in ROOTED else -1
                for in_place in (False, True):
                    case = Case(dtype, count, op, root, in_place=in_place, collective=name)
                    title = f"{name} {dtype} {count}{' in place' if in_place else ''}"
                    yield title, partial(one_case, case)
        for way in ("new", "asynchronous", "plan"):
            op = "sum" if name in REDUCTIONS else ""
            root = 0 if name in ROOTED else -1
            case = Case("float32", 1000, op, root, collective=name, way=way)
            yield f"{name} {way}", partial(one_case, case)
    yield "send_recv in a ring", ring
    yield "barrier", lambda comm, kit: comm.barrier()
    yield "a list of 50 arrays", fused
    yield "the user's own operation", own_operation
    yield from composed_checks()
    for size in TIMED_BYTES:
        yield f"time of all_reduce float32 {size}", partial(timed, size)


def one_case(case: Case, comm: Any, kit: Any) -> dict[str, Any] | None:
    """Run a case of the tests."""
    found: dict[str, Any] | None = kit.run(comm, case)
    return found


def ring(comm: Any, kit: Any) -> None:
    """Send to the next rank, and receive from the previous one."""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    x, out = kit.array(np.full(5000, comm.rank, np.float32)), kit.array(np.zeros(5000, np.float32))
    comm.send_recv(x, after, before, out=out)
    comm.check()
    expect(kit.read(out), before)


def fused(comm: Any, kit: Any) -> None:
    """Reduce a list in one call."""
    arrays = [kit.array(np.full(64 + n, comm.rank + n, np.float32)) for n in range(50)]
    ranks = comm.world_size
    for n, total in enumerate(comm.all_reduce(arrays)):
        expect(kit.read(total), ranks * (ranks - 1) / 2 + ranks * n)


def own_operation(comm: Any, kit: Any) -> None:
    """Reduce with a function written by the user."""
    op = gpucoll.ReduceOp.custom(lambda a, b: a + b + a * b)
    found = comm.all_reduce(kit.array(np.full(1000, 0.5, np.float32)), op=op)
    expect(kit.read(found), 1.5**comm.world_size - 1, 1e-4 * 1.5**comm.world_size)


def timed(size_bytes: int, comm: Any, kit: Any) -> dict[str, Any]:
    """Return the time of a call; ranks that share a GPU say nothing about a cluster."""
    x = kit.array(np.ones(size_bytes // 4, np.float32))
    out = kit.array(np.zeros(size_bytes // 4, np.float32))
    times, enqueued = [], []
    for _ in range(10):
        comm.barrier()
        begin = time.perf_counter()
        comm.all_reduce(x, out=out)
        enqueued.append(time.perf_counter() - begin)
        kit.wait()
        times.append(time.perf_counter() - begin)
    comm.check()
    expect(kit.read(out), comm.world_size)
    middle = sorted(times)[5]
    return {
        "size_bytes": size_bytes,
        "time_s": middle,
        "host_s": sorted(enqueued)[5],
        "rate": size_bytes / middle,
        "times_s": times,
    }


UNMIXED = ("bfloat16", "compressed", "captured")
"""Calls that CuPy's arrays lack, and calls that need host arrays."""
ROTATED = ("prod complex",)
"""Calls whose zeros have another sign in another order than that of the ranks."""


def run(
    backend: str,
    array: str,
    output: Path,
    wanted: str = "",
    *,
    is_mixed: bool = False,
    on_hosts: bool = False,
) -> int:
    """Run all checks whose name contains a word; return how many failed. All ranks call this."""
    with gpucoll.init(backend="cpu", timeout_s=2 * MEETING_S) as control:
        if is_mixed and control.rank:
            os.environ[config.CPU_ONLY], array = "1", "numpy"
        kit = KITS[array]()
        options = _own_host(control.rank, control.world_size, output) if on_hosts else {}

        def opened() -> Any:
            return gpucoll.init(
                backend=backend,
                device=kit.device,
                mixed=is_mixed,
                timeout_s=CALL_S,
                on_async_error="raise",
                **options,
            )

        comms = [opened()]
        if control.rank == 0:
            print(comms[0].describe(), flush=True)

        def open_again() -> None:
            comms[0].abort()
            comms[0] = opened()

        def run_check(check: Check) -> dict[str, Any] | None:
            return check(comms[0], kit)

        def steps() -> Iterator[Step]:
            for name, check in checks(control.world_size):
                is_ring = on_hosts or config.direct_schedule() == "ring"
                unfit = (*UNMIXED * is_mixed, *ROTATED * is_ring)
                if wanted in name and not any(word in name for word in unfit):
                    yield name, partial(run_check, check)

        refusals = ArgumentTypeError, BackendUnavailableError  # the same on all ranks
        failed = run_on_ranks(control, steps(), output, refusals, open_again)
        comms[0].close()
    return failed


def _own_host(rank: int, world_size: int, output: Path) -> dict[str, Any]:
    """Let this rank play a host of its own; return arguments of init with which it meets others."""
    between.LEAST_BYTES = 64  # type: ignore[misc]
    os.environ[config.HOST_ID] = f"host of rank {rank}"
    os.environ.setdefault(config.SECRET, "no secret: it is one host")
    os.environ.setdefault(config.INTERFACES, "lo")
    meet = f"file://{output.resolve()}.meet"
    return {"rank": rank, "world_size": world_size, "meet": meet, "name": "hosts"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Check every call against the oracle.")
    parser.add_argument("--backend", default="direct")
    parser.add_argument("--array", choices=tuple(KITS), default="cupy")
    parser.add_argument("--staged", action="store_true", help="do not share GPU memory")
    parser.add_argument("--ring", action="store_true", help="go around a ring, on one host")
    parser.add_argument("--hosts", action="store_true", help="play a host for each rank")
    parser.add_argument("--mixed", action="store_true", help="use the GPU on rank 0 only")
    parser.add_argument(
        "--only", default="", metavar="WORD", help=("only checks whose name contains WORD")
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    if given.staged:
        peer_memory.MOST_RANKS = 0  # type: ignore[misc]
    if given.ring:
        os.environ[config.DIRECT_SCHEDULE] = "ring"
        peer.ONE_SHOT_BYTES = 64  # type: ignore[misc]
    parts = given.backend, given.array, given.output, given.only
    failed = run(*parts, is_mixed=given.mixed, on_hosts=given.hosts)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
