"""Which library an object belongs to: told without importing any, refused with a remedy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from gpucoll.arrays.operands import template_of
from gpucoll.errors import ArgumentTypeError

UNTOUCHED = ("cupy", "jax", "ml_dtypes", "pandas", "scipy", "torch")


def test_nothing_is_imported_that_the_user_has_not_imported():
    program = f"""
import sys
import numpy as np
from gpucoll.arrays.operands import prepare
for x in (np.ones(3), 1.5, b"abc"):
    prepare(x)
print([name for name in {UNTOUCHED} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("pandas.core.series", r"x is a pandas.core.series.Table: pass x.to_numpy\(\)"),
        ("polars.series.series", r"pass x.to_numpy\(\)"),
        ("scipy.sparse._csr", r"pass x.toarray\(\)"),
        ("tensorflow.python.framework.ops", r"pass x.numpy\(\)"),
        ("xarray.core.dataarray", "pass x.values"),
        ("dask.array.core", r"x.compute\(\)"),
    ],
)
def test_others_are_refused_with_a_remedy(module, remedy):
    table = type("Table", (), {"__module__": module, "__array_interface__": None})
    derived = type("Derived", (table,), {"__module__": "mine"})

    with pytest.raises(ArgumentTypeError, match=remedy):
        template_of(table())
    with pytest.raises(ArgumentTypeError, match=remedy.partition(": ")[2] or remedy):
        template_of(derived())


def test_refused_libraries_are_not_served_as_buffers():
    tensor = type("Tensor", (bytearray,), {"__module__": "tensorflow.python"})

    with pytest.raises(ArgumentTypeError, match=r"pass x.numpy\(\)"):
        template_of(tensor(3))


@pytest.mark.parametrize("x", ["text", None, {}, [1.0], object(), np.dtype("f4"), range(3), len])
def test_what_is_no_array_is_told_what_is(x):
    with pytest.raises(ArgumentTypeError, match=r"must be an array \(NumPy, PyTorch, .*; got "):
        template_of(x)


def test_derived_classes_are_served_as_what_they_derive_from():
    derived = type("Derived", (np.ndarray,), {"__module__": "mine"})

    assert template_of(np.zeros(3).view(derived)).library.NAME == "a NumPy array"
