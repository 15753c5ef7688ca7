"""CuPy's own NCCL module, driven by the double: it would not know of a misreading of ours."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
from tests.calls.gpu import cupy_double
from tests.doubles.communicators import Memory

from gpucoll import devices
from gpucoll.bench.collectives import COLLECTIVES
from gpucoll.bench.rank.cupy_nccl import CupyNccl
from gpucoll.bench.rank.session import Session

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="no CuPy (extra test-gpu)"
)

DTYPES = {
    "NCCL_INT8": np.int8,
    "NCCL_UINT8": np.uint8,
    "NCCL_INT32": np.int32,
    "NCCL_UINT32": np.uint32,
    "NCCL_INT64": np.int64,
    "NCCL_UINT64": np.uint64,
    "NCCL_FLOAT16": np.float16,
    "NCCL_FLOAT32": np.float32,
    "NCCL_FLOAT64": np.float64,
}
OPS: dict[str, Any] = {
    "NCCL_SUM": np.sum,
    "NCCL_PROD": np.prod,
    "NCCL_MAX": np.max,
    "NCCL_MIN": np.min,
}


def drive(seat, double):
    """Return what differs from NumPy."""
    double.load()  # before CuPy looks for a library of this name
    from cupy.cuda import nccl

    wrong: list[tuple] = []
    device = devices.open_device("cuda", seat.rank)
    stream = device.create_stream()
    with seat.init() as host:
        unique_id = host.broadcast_object(nccl.get_unique_id() if seat.rank == 0 else None)
    n, rank = seat.world_size, seat.rank
    with device:
        comm = nccl.NcclCommunicator(n, unique_id, rank)
        assert (comm.size(), comm.rank_id(), comm.device_id()) == (n, rank, rank)

        def check(what, memory, expected):
            device.synchronize_stream(stream)
            if not np.array_equal(memory.array, expected):
                wrong.append((what, memory.array, expected))

        for type_name, dtype in DTYPES.items():
            rows = [(np.arange(8) + r).astype(dtype) for r in range(n)]
            code = getattr(nccl, type_name)
            for op_name, fold in OPS.items():
                x, out = Memory(device, rows[rank]), Memory(device, np.zeros(8, dtype))
                arguments = code, getattr(nccl, op_name), stream
                comm.allReduce(x.address, out.address, 8, *arguments)
                check((type_name, op_name), out, np.asarray(fold(np.stack(rows), 0)).astype(dtype))
            out = Memory(device, np.zeros(8 * n, dtype))
            comm.allGather(x.address, out.address, 8, code, stream)
            check((type_name, "allGather"), out, np.concatenate(rows))
            out = Memory(device, np.zeros(8, dtype))
            comm.broadcast(x.address, out.address, 8, code, 1, stream)
            check((type_name, "broadcast"), out, rows[1])
        nccl.groupStart()
        comm.send(x.address, 8, code, (rank + 1) % n, stream)
        comm.recv(out.address, 8, code, (rank - 1) % n, stream)
        nccl.groupEnd()
        check("ring", out, rows[rank - 1])
        with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
            comm.reduce(x.address, out.address, 8, code, 0, n, stream)
        assert comm.check_async_error() is None
        comm.destroy()
    return wrong


def test_cupy_drives_the_double(rank_server, doubles):
    double = doubles.double("nccl")
    with rank_server.fork(2) as pool:  # CuPy stays in them
        options = {"gives": "seat", "environment": double.variables}
        assert pool.call(drive, double, **options) == [[], []]


def measure(seat, double, store):
    """Check every call of the bench's peer over these bindings; return who has what, and wrongs."""
    double.load()
    importlib.import_module("cupy.cuda.nccl")  # the real one, beside the arrays of a look-alike
    cupy_double.install("cuda").cuda.Device(seat.rank).use()
    found = {}
    with devices.open_device("cuda", seat.rank):
        session = Session(CupyNccl(seat.rank, seat.world_size, store, 20.0))
        for name, traits in COLLECTIVES.items():
            if not traits.has_data:
                continue
            redop = "sum" if traits.reduces else "none"
            answer = session.answer(
                {"do": "prepare", "collective": name, "dtype": "float32", "redop": redop}
                | {"root": 1, "count": 2026, "variants": ["private"], "list_length": 1}
            )
            for case in answer["cases"]:
                wrong = session.answer({"do": "check", "case": case})["wrong"]
                session.answer({"do": "measure", "case": case, "reps": 3})
                found[name, case.partition("/")[2]] = wrong
        session.library.close()
    return found


def test_the_bench_measures_it(rank_server, doubles, tmp_path):
    double = doubles.double("nccl")
    with rank_server.fork(2) as pool:
        options = {"gives": "seat", "environment": double.variables}
        results = pool.call(measure, double, str(tmp_path / "store"), **options)
    for found in results:
        assert not any(found.values())
        both = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
        messages = ("send_recv", "ping_pong", "stream")
        expected = {(name, side) for name in both for side in ("out_of_place", "in_place")}
        assert set(found) == expected | {(name, "out_of_place") for name in messages}
