"""Environments that the tests of several folders share."""

from __future__ import annotations

import os

import pytest
from tests.integrations.environments import Environment


@pytest.fixture(scope="session")
def tensorflow(tmp_path_factory) -> Environment:
    """The environment with TensorFlow and Keras; the workers of pytest-xdist share one."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Environment("tensorflow", tmp_path_factory.mktemp("tensorflow"), shared)
