"""Kernels on the doubles of both drivers, compiled by the doubles of both compilers."""

from __future__ import annotations

from typing import Any

import pytest

from gpucoll import devices
from gpucoll.kernels.gpu import launch


@pytest.fixture(params=["nccl", "rccl"])
def double(request, doubles):
    found = doubles.double(request.param)
    if found.rtc is None:
        pytest.skip("no C++ compiler (g++, clang++) for the double of the kernels' compiler")
    return found


@pytest.fixture
def on_device(gpu_ranks, double):
    """Return what calls ``function(device, control, ...)`` in a process with the doubles."""

    def call(function: Any, *args: Any, variables: dict[str, str] | None = None) -> Any:
        (answer,) = gpu_ranks.call(
            1,
            inside,
            double,
            function,
            args,
            gives="seat",
            environment={**double.variables, **(variables or {})},
        )
        return answer

    return call


def inside(_seat, double, function, args):
    control = double.load()
    launch.launcher_of.cache_clear()
    return function(devices.open_device(double.kind, 1), control, *args)
