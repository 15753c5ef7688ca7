"""Environments that the tests of several folders share."""

from __future__ import annotations

import os

import pytest
from tests.integrations.environments import Environment


@pytest.fixture(scope="session")
def tensorflow(tmp_path_factory) -> Environment:
    """The environment with TensorFlow and Keras."""
    return _shared("tensorflow", tmp_path_factory)


@pytest.fixture(scope="session")
def mxnet(tmp_path_factory) -> Environment:
    """The environment with MXNet."""
    return _shared("mxnet", tmp_path_factory)


@pytest.fixture(scope="session")
def flower(tmp_path_factory) -> Environment:
    """The environment with Flower."""
    return _shared("flower", tmp_path_factory)


def _shared(name: str, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment that the workers of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Environment(name, tmp_path_factory.mktemp(name), shared)
