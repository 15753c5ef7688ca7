"""Programs of checks: every rank runs the functions that are named, or all."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import gpucoll

FAILURES = (jax.errors.JaxRuntimeError, ValueError)
"""What JAX raises for a call that failed: when it runs at once, and when a result is waited for."""


def same(found, expected):
    """Compare with NumPy's result: the dtype is ours, and the numbers are exact."""
    expected = np.asarray(expected)
    assert np.shape(found) == expected.shape, (np.shape(found), expected.shape)
    np.testing.assert_array_equal(np.asarray(found, expected.dtype), expected)


def text_of(function, *arguments):
    """Return the text of the error that a call ends in, whatever the moment when JAX raises it."""
    try:
        jax.block_until_ready(function(*arguments))
    except FAILURES as error:
        return str(error)
    raise AssertionError("no error")


def refused(kind, function, *arguments):
    """Return the text of the error of a call that is refused when it is traced."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind}")


def run(module):
    """Call the functions of a module whose names begin with ``check_``, in the module's order."""
    named = sys.argv[1:]
    with gpucoll.init(timeout_s=20) as comm:
        for name, function in list(module.items()):
            if name.startswith("check_") and (not named or name in named):
                function(comm)
                print(f"{name} passed", flush=True)
