"""Builds of kernels for GPUs, side by side: those that the tests of a module want."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gpucoll.kernels.gpu.catalogue import all_kernels

FILES = ("reduce.cu", "pack.cu", "quantise.cu")


def each_build(architectures: tuple[str, ...]) -> pytest.MarkDecorator:
    """Return what parametrises a test by all files for all architectures."""
    pairs = [(name, file) for name in architectures for file in FILES]
    return pytest.mark.parametrize(("architecture", "file"), pairs)


def names_of(file: str) -> set[str]:
    return {kernel.name for kernel in all_kernels() if kernel.file == file}


def start_builds(
    request: pytest.FixtureRequest, build: Callable[[str, str], Any]
) -> Iterator[Callable[[str, str], Any]]:
    """Yield what returns a build; those that this module's tests want are started at once."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        started: dict[tuple[str, str], Future[Any]] = {}

        def start(architecture: str, file: str) -> Future[Any]:
            pair = architecture, file
            return started.setdefault(pair, started.get(pair) or pool.submit(build, *pair))

        for item in request.session.items:
            call = getattr(item, "callspec", None)
            if call and item.path == request.path and "architecture" in call.params:
                start(call.params["architecture"], call.params["file"])
        yield lambda architecture, file: start(architecture, file).result()
        pool.shutdown(cancel_futures=True)
