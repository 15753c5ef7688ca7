"""A failure on the GPU that nobody asks about: it ends the process, or waits for the next call."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.calls.gpu.conftest import in_rank
from tests.ranks import Ended
from tests.waiting import is_broken, until

from gpucoll.errors import DeadlineError


def ones(kit):
    return kit.seen_as(kit.bytes_of(np.ones(4, np.float32).view(np.uint8)), (4,), "float32")


def never_ask(rank, on_async_error):
    from gpucoll.backends.gpu import monitor_thread

    monitor_thread.ASKING_S = 0.1
    comm = rank.init(on_async_error=on_async_error, timeout_s=1, meet_s=20)
    comm.all_reduce(ones(rank.kit), timeout_s=20)
    comm.check()
    if rank.rank == 0:
        comm.all_reduce(ones(rank.kit))
        if on_async_error == "exit":
            threading.Event().wait(20)  # the process is ended meanwhile
            return "went on"
    until(lambda: is_broken(comm))
    with pytest.raises(DeadlineError):
        comm.all_reduce(ones(rank.kit))
    comm.close()
    return "told"


def test_exit(rank_server, gpus):
    with rank_server.fork(2) as pool:
        arguments = gpus.double, never_ask, ("exit",)
        pool.start(in_rank, *arguments, gives="seat", environment=gpus.variables)
        first, second = pool.collect()
        output = pool.output()

    assert isinstance(first, Ended)
    assert first.exit_code == 70
    assert second.result == "told"
    assert "rank 0 of 2 is ended, because a call on GPU arrays failed" in output
    assert "DeadlineError: rank 0 of 2 waited 1 s in all_reduce(" in output
    assert "rank 1 had not made this call" in output


def test_raise(gpus):
    assert gpus.call_ranks(2, never_ask, "raise") == ["told"] * 2


PROGRAM = """
import sys, threading
import numpy as np
sys.path.insert(0, {root!r})
from tests.calls.gpu import cupy_double
import gpucoll
from gpucoll import devices
cupy = cupy_double.install("cuda")
devices.open_device("cuda", 0)  # the driver is in the process
with gpucoll.init(timeout_s=20) as comm:
    cupy.cuda.Device(comm.rank).use()
    total = comm.all_reduce(cupy.asarray(np.ones(3)))
    comm.check()
    print("sum", total.get().tolist(), flush=True)
    if {fails} and comm.rank == 0:
        comm.all_reduce(total, timeout_s=0.5)
        threading.Event().wait(20)
    if {fails}:
        threading.Event().wait(20)
"""


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("fails", [False, True])
def test_under_the_launcher(gpus, tmp_path, fails):
    import os
    import subprocess
    import sys
    from pathlib import Path

    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[3]), fails=fails))
    variables = {**os.environ, **gpus.variables, **gpus.double.search_path}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    variables["GPUCOLL_GRACE_S"] = "0.5"
    command = [sys.executable, "-m", "gpucoll.launcher.cli", "-n", "2", str(program)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)

    assert done.stdout.count("sum [2.0, 2.0, 2.0]") == 2, done.stderr
    if not fails:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 70, done.stderr
    assert "is ended, because a call on GPU arrays failed" in done.stderr
