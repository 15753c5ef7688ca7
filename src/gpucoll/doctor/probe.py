"""One probe, in this process: ``python -m gpucoll.doctor.probe NAME SECONDS [ARGUMENT ...]``.

It prints one line of JSON: ``{"found": ..., "problem": null}``.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from types import MappingProxyType

PROBES = MappingProxyType(
    {
        "cpus": "gpucoll.doctor.host:cpus",
        "memory": "gpucoll.doctor.host:memory",
        "kernels": "gpucoll.doctor.host:kernels",
        "packages": "gpucoll.doctor.host:packages",
        "gpus": "gpucoll.doctor.gpus:gpus",
        "libraries": "gpucoll.doctor.libraries:candidates",
        "library": "gpucoll.doctor.libraries:look",
        "mpi": "gpucoll.doctor.mpi:mpi",
        "nvlinks": "gpucoll.topology.nvlinks:nvlinks",
        "topology": "gpucoll.doctor.network:topology",
        "gpu_network": "gpucoll.doctor.network:gpu_network",
        "self_test": "gpucoll.doctor.self_test:self_test",
    }
)
"""Name -> function, which takes the arguments as text and returns a value for JSON."""

GRACE_S = 5


def main(arguments: list[str]) -> None:
    """Run the probe that the arguments name."""
    name, seconds, *rest = arguments
    # Ctrl-C and the end of the parent must end this process even inside foreign code, where
    # Python's own handler would wait for the call to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(float(seconds)) + GRACE_S)
    # Libraries may print to standard output, so redirect it to standard error.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, _, function = PROBES[name].partition(":")
    found, problem = None, None
    try:
        found = getattr(importlib.import_module(module), function)(*rest)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    with answer:
        json.dump({"found": found, "problem": problem}, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
