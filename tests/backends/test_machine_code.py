"""Making the package's machine code: for which levels, what is in it, and that levels agree."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from tests.dtypes import any_values, dtype_of

from gpucoll import config
from gpucoll.backends import machine_code
from gpucoll.errors import ArgumentError, BackendUnavailableError
from gpucoll.kernels.cpu import addresses, levels, library

V2, V3, V4, ARM = levels.LEVELS


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.delenv(config.BUILD_FOR, raising=False)


EMIT = """\
import sys
from pathlib import Path
from gpucoll.kernels.cpu import addresses, codegen, levels, linking
codegen.make_for(*(level for level in levels.LEVELS if level.name == sys.argv[1]))
kinds = [("float32", "prod"), ("float16", "sum"), ("bfloat16", "avg"), ("float64", "min")]
kernels = [addresses._reduce(dtype, operation) for dtype, operation in kinds]
emitted = [(kernel.name, kernel.emit()) for kernel in kernels]
Path(sys.argv[2]).write_bytes(linking.linked([], emitted, codegen.library_machine()))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Some kernels for each level that this processor reaches."""
    folder = tmp_path_factory.mktemp("levels")
    for level in levels.levels_here():
        file = folder / level.name
        command = [sys.executable, "-c", EMIT, level.name, str(file)]
        subprocess.run(command, timeout=60, check=True)
    return [library.load(file) for file in folder.iterdir()]


class TestMaking:
    def test_the_best_of_this_processor_by_default(self):
        assert machine_code.asked_levels() == levels.levels_here()[:1]

    def test_a_processor_of_no_level(self, monkeypatch):
        monkeypatch.setattr(machine_code, "levels_here", list)
        with pytest.raises(BackendUnavailableError, match="reaches no level"):
            machine_code.asked_levels()

    def test_named_levels(self, monkeypatch):
        monkeypatch.setattr(machine_code, "of_this_machine", lambda: [V2, V3, V4])
        for asked, expected in {
            "all": [V2, V3, V4],
            "x86-64-v4, x86-64-v2": [V2, V4],
            "x86-64-v3": [V3],
        }.items():
            monkeypatch.setenv(config.BUILD_FOR, asked)
            assert machine_code.asked_levels() == expected
        monkeypatch.setenv(config.BUILD_FOR, "x86-64-v3,arm64")
        with pytest.raises(ArgumentError, match="=x86-64-v3,arm64: arm64 is none of the levels"):
            machine_code.asked_levels()

    def test_each_kernel_is_in_one_part(self):
        names = [kernel.name for part in machine_code._PARTS for kernel in part.kernels()]
        assert len({*names}) == len(names)
        assert "gpucoll_reduce_sum_bfloat16" in names
        assert not {name for name in names if "avg_bool" in name or "min_complex" in name}

    @pytest.mark.parametrize(
        ("dtype", "operation"),
        [("float32", "prod"), ("float16", "sum"), ("bfloat16", "avg"), ("float64", "min")],
    )
    def test_kernels_agree_on_all_levels(self, made, dtype, operation):
        """Ranks of one job may run code of different levels. NaNs may differ in their payloads."""
        kinds = dtype_of(dtype), np.dtype(f"u{dtype_of(dtype).itemsize}")
        results = []
        for loaded in made:
            total = self.reduced(loaded, dtype, operation)
            total[np.isnan(total.astype(np.float64))] = 7
            results.append(total.view(kinds[1]))
        assert all((result == results[0]).all() for result in results)

    def reduced(self, loaded, dtype, operation):
        """Return what a kernel makes of three arrays of any bits."""
        arrays = [any_values(dtype, 1003, seed) for seed in range(3)]
        total = np.empty_like(arrays[0])
        tables = [np.array([x.ctypes.data for x in group], np.int64) for group in ([total], arrays)]
        kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * addresses.REDUCE_ARGUMENTS)(
            loaded.address(f"gpucoll_reduce_{operation}_{dtype}")
        )
        parameter = addresses.parameter_for(dtype, [3.0])
        with_tables = [tables[0].ctypes.data, 1, tables[1].ctypes.data, len(arrays)]
        kernel(*with_tables, total.size, parameter.ctypes.data, 0)
        return total

    def test_a_failure_in_the_child_is_noticed(self, capfd):
        def fail():
            raise ValueError("no library")

        with pytest.raises(SystemExit, match="1"):
            machine_code._in_child(fail)
        assert "ValueError: no library" in capfd.readouterr().err
        with pytest.raises(SystemExit, match="a process was ended by signal 9"):
            machine_code._in_child(lambda: os.kill(os.getpid(), 9))

    def test_the_reason_of_a_part_is_the_last_line(self, tmp_path, monkeypatch, capfd):
        monkeypatch.setattr(machine_code, "_NAME", "gpucoll.no_such_module")
        with pytest.raises(ChildProcessError, match="No module named gpucoll"):
            machine_code._make_part(tmp_path, [V2], "0" * 16, 0)
        assert "No module" in capfd.readouterr().err
