"""Kept results as ``--json`` writes them, made of numbers that a test chooses."""

from __future__ import annotations

import json

import numpy as np

from gpucoll.bench.results import Measurement, Results, Row

SIZES = tuple(4 << 2 * step for step in range(13))  # 4 B to 64 MiB
LIBRARIES = {"gpucoll": 1.0, "mpich": 3.0, "impi": 2.0}


def environment(**more):
    """Return an environment; keywords replace what it says."""
    return {
        "command": "gpucoll-bench all_reduce --compare mpich=/home/me/python,impi --json a.json",
        "date": "2030-01-02T03:04:05+00:00",
        "gpucoll": "1.0",
        "array": "numpy",
        "cpu": "A CPU",
        "ranks": 2,
        "usable_cpus": 2,
        "pinned_cpus": [0, 1],
        "kernel": "Linux 6.1 x86_64",
        "python": "3.12.0",
        "numpy": "2.4",
        "timing": "A sample is a loop of calls.",
        "libraries": {name: {"library": f"{name} 1"} for name in LIBRARIES},
        **more,
    }


def content(seed=0, noise=0.02, rounds=7, factor=None, sizes=SIZES, limit=True, **about):
    """Return the content of a file with one call.

    A call takes 1 us and 1 us for each 64 KiB. `factor` is a function of library, side and size
    that changes the time.
    """
    generator = np.random.default_rng(seed)
    ranks = about.get("ranks", 2)

    def row(library, time_us, size):
        sides = []
        for side in ("out_of_place", "in_place"):
            changed = factor(library, side, size) if factor else 1.0
            level = time_us * changed * (1 + size / 65536)
            rounded = level * np.exp(generator.normal(0, noise, (ranks, rounds)))
            sides.append(Measurement(rounded, 10, 0))
        where = (library, "private", "all_reduce", ranks, size, size // 4, "float32", "sum", -1)
        return Row(*where, sides[0], sides[1])

    rows = [row(name, time_us, size) for size in sizes for name, time_us in LIBRARIES.items()]
    limits = [row("limit", 0.5, size) for size in sizes] if limit else []
    return Results(environment(**about), rows, limits).as_json()


def write(folder, name, made):
    """Write a content to a file; return its path as text."""
    path = folder / name
    path.write_text(json.dumps(made))
    return str(path)
