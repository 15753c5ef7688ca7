"""Requests and engines for tests, on ranks."""

from __future__ import annotations

import pytest

from gpucoll.integrations.horovod.engine.engine import Engine, Options
from gpucoll.integrations.horovod.engine.numpy_arrays import NumpyArrays
from gpucoll.integrations.horovod.engine.request import Kind, ReduceOp, Request
from gpucoll.integrations.horovod.exceptions import HorovodInternalError

LIBRARY = NumpyArrays()
WAIT_S = 10.0


def reduction(x, name, op=ReduceOp.SUM, **given):
    return Request(Kind.ALLREDUCE, name, LIBRARY, [x], op=op, **given)


def other(kind, name, *arrays, **given):
    return Request(kind, name, LIBRARY, [*arrays], **given)


def on_engine(function):
    """Return a function of a communicator that gives `function` an engine, and closes it."""

    def run(comm, *args):
        engine = Engine(comm.duplicate(), Options())
        try:
            return function(engine, *args)
        finally:
            engine.close()

    return run


def run_in(engine, request):
    engine.run(request)
    return request.results


def error_of(engine, request):
    with pytest.raises(HorovodInternalError) as caught:
        engine.run(request)
    return str(caught.value)
